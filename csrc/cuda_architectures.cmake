# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
#
# Sets `architectures`, the GPUs that kernels are compiled for, and `gencode`, nvcc's flags
# for them. By itself, to look at them: cmake -P csrc/cuda_architectures.cmake
#
# TORCH_CUDA_ARCH_LIST chooses the GPUs, in PyTorch's spelling: "9.0a;12.0f", also with
# spaces; "+PTX" behind one adds code that later GPUs can translate.

# One build serves all: f stands for a family (10.3 runs 10.0f, 12.1 runs 12.0f).
set(architectures 8.0 8.6 8.9 9.0a 10.0f 12.0f)
if(NOT "$ENV{TORCH_CUDA_ARCH_LIST}" STREQUAL "")
  string(REGEX MATCHALL "[^ ;,]+" architectures "$ENV{TORCH_CUDA_ARCH_LIST}")
endif()
set(gencode "")
foreach(architecture ${architectures})
  if(NOT architecture MATCHES "^([0-9]+)\\.([0-9][af]?)(\\+PTX)?$")
    message(FATAL_ERROR "TORCH_CUDA_ARCH_LIST: '${architecture}' is no architecture; "
                        "write numbers, such as \"8.0;9.0a;12.0f+PTX\"")
  endif()
  set(number ${CMAKE_MATCH_1}${CMAKE_MATCH_2})
  set(ptx ${CMAKE_MATCH_3})
  if(CMAKE_MATCH_1 LESS 8)
    message(FATAL_ERROR "TORCH_CUDA_ARCH_LIST: ${architecture}: the kernels need "
                        "tensor cores of 8.0 or newer")
  endif()
  list(APPEND gencode "-gencode=arch=compute_${number},code=sm_${number}")
  if(ptx)
    list(APPEND gencode "-gencode=arch=compute_${number},code=compute_${number}")
  endif()
endforeach()
if(CMAKE_SCRIPT_MODE_FILE)
  message("${gencode}")
endif()
