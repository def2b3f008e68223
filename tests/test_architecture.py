import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    "command", [["lint-imports"], ["ruff", "check", "."], ["ruff", "format", "--check", "."]], ids=" ".join
)
def test_the_linters_have_nothing_to_say(command):
    program = shutil.which(command[0], path=str(Path(sys.executable).parent))
    result = subprocess.run([program, *command[1:]], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
