# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""What several test files of the library and its tools share."""

import pytest

from tests.exl3.grafts import Stored


@pytest.fixture(scope="session")
def stored(tmp_path_factory):
    return Stored(tmp_path_factory.mktemp("stored"))
