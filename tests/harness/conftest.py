"""One thread a worker: these tests are about right and wrong, and share their machine with others."""

import pytest


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        yield
