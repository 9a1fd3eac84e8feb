# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""The EXL3 format as plain data: constants, names, metadata. No torch, no files."""
