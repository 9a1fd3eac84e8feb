# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""EXL3: a library for trellis-quantized weights. Knows nothing of vLLM.

Importing this package loads neither torch nor numpy; `exl3.ops` does.
"""
