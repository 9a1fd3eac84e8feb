// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
//
// The library's ops, registered with torch through its stable ABI, so that one
// build serves every torch from 2.11 on. Nothing outside this folder includes a
// torch header.

#include <Python.h>
#include <torch/csrc/stable/library.h>

#include <cstdint>

namespace {

// Raised whenever an op's schema changes. exl3/ops.py compares it with its own, so
// that a stale build is named instead of failing inside an op.
constexpr int64_t kOpsVersion = 4;

int64_t ops_version() { return kOpsVersion; }

}  // namespace

STABLE_TORCH_LIBRARY(exl3, m) { m.def("ops_version() -> int"); }

STABLE_TORCH_LIBRARY_IMPL(exl3, CompositeExplicitAutograd, m) {
  m.impl("ops_version", TORCH_BOX(&ops_version));
}

// Importing the module is what registers the ops; it holds nothing itself.
PyMODINIT_FUNC PyInit__C() {
  static PyModuleDef module{};
  module.m_base = PyModuleDef_HEAD_INIT;
  module.m_name = "_C";
  return PyModule_Create(&module);
}
