# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""`exl3 graft-mtp`: an EXL3 MTP layer for a checkpoint that has a dense one."""
