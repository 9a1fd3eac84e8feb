# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
#
# The CUDA kernels of exl3/_C.

include(${CMAKE_CURRENT_LIST_DIR}/cuda_architectures.cmake)
include(CheckLanguage)
set(CMAKE_CUDA_ARCHITECTURES OFF) # ours are in the flags, by -gencode
check_language(CUDA)
if(NOT CMAKE_CUDA_COMPILER)
  message(FATAL_ERROR "there is no nvcc to compile the CUDA kernels with; put CUDA's bin "
                      "folder on PATH, name nvcc by CUDACXX, or set EXL3_CUDA=0")
endif()
enable_language(CUDA)
if(CMAKE_CUDA_COMPILER_VERSION VERSION_LESS 12.9)
  message(FATAL_ERROR "${CMAKE_CUDA_COMPILER} is ${CMAKE_CUDA_COMPILER_VERSION}; "
                      "the CUDA kernels need nvcc 12.9 or newer")
endif()
set(CMAKE_CUDA_STANDARD 17)
set(CMAKE_CUDA_STANDARD_REQUIRED ON)
set(CMAKE_CUDA_VISIBILITY_PRESET hidden)
message(STATUS "CUDA kernels for ${architectures}, by nvcc ${CMAKE_CUDA_COMPILER_VERSION}")

# A file that uses EXL3_WORDS is compiled once for each number of words that a tile can
# have; words.h lists them.
set(launch ${CMAKE_CURRENT_SOURCE_DIR}/csrc/exl3/launch)
file(READ ${CMAKE_CURRENT_SOURCE_DIR}/csrc/exl3/kernels/words.h words)
string(REGEX MATCH "define EXL3_FOR_EACH_WORDS[^#]*" words "${words}")
string(REGEX MATCHALL "apply\\([0-9]+\\)" words "${words}")
list(TRANSFORM words REPLACE "[^0-9]" "")

function(add_kernels target)
  add_library(${target} OBJECT ${ARGN})
  target_include_directories(${target} PRIVATE csrc)
  set_target_properties(${target} PROPERTIES POSITION_INDEPENDENT_CODE ON)
  target_compile_options(${target} PRIVATE ${gencode} -Xfatbin=-compress-all)
  target_link_libraries(exl3_ops PRIVATE ${target})
endfunction()

file(GLOB kernels CONFIGURE_DEPENDS ${launch}/*.cu)
set(common "")
set(of_words "")
foreach(kernel ${kernels})
  file(STRINGS ${kernel} uses_words REGEX "<EXL3_WORDS>" LIMIT_COUNT 1)
  if(uses_words)
    list(APPEND of_words ${kernel})
  else()
    list(APPEND common ${kernel})
  endif()
endforeach()
add_kernels(exl3_kernels ${common})
foreach(number ${words})
  add_kernels(exl3_kernels_${number} ${of_words})
  target_compile_definitions(exl3_kernels_${number} PRIVATE EXL3_WORDS=${number})
endforeach()

# The runtime is linked in, so that the library loads where there is no GPU, and with
# any build of torch.
find_library(cudart cudart_static HINTS ${CMAKE_CUDA_IMPLICIT_LINK_DIRECTORIES} REQUIRED)
target_link_libraries(exl3_ops PRIVATE ${cudart} dl pthread rt)
target_include_directories(exl3_ops SYSTEM PRIVATE
                           ${CMAKE_CUDA_TOOLKIT_INCLUDE_DIRECTORIES})
