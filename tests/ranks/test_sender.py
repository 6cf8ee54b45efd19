"""The thread that makes calls while its rank computes."""

import subprocess
import sys


def test_a_process_that_ends_does_not_wait_for_its_calls():
    code = "import d2lpar, time; d2lpar.ranks.Sender().submit(time.sleep, 999)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
