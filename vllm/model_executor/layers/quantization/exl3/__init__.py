# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""EXL3 as a quantization method: layers that hold trellis weights, and their loading.

The format itself is the library's, `exl3`; there is no arithmetic of it here.
"""
