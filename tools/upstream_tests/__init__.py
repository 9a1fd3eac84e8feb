# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""Composes the fork: one pinned upstream wheel, with our files laid over it."""
