"""One thread per test worker, the same examples in every run, and the optional folder of local data."""
import os
import signal
from pathlib import Path

import pytest
import torch
from hypothesis import settings

torch.set_num_threads(1)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # started in the background by a shell: the tests of Ctrl-C need to hear it
    signal.signal(signal.SIGINT, signal.default_int_handler)
settings.register_profile("tinylm", derandomize=True, deadline=None)
settings.load_profile("tinylm")


@pytest.fixture(scope="session")
def local_data():
    "The folder named by TINYLM_LOCAL_DATA: books as published and reference answers; optional, never needed."
    folder = os.environ.get("TINYLM_LOCAL_DATA")
    if not folder or not Path(folder).is_dir():
        pytest.skip("TINYLM_LOCAL_DATA does not name a folder: this check needs data that is not in the repository")
    return Path(folder)
