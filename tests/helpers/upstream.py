"""`make upstream`: run Accelerate's own tracking tests, from the source of the installed version, with fanfold's Accelerator.

As a pytest plugin (`-p upstream`), this file replaces the class.
"""

import os
import subprocess
import sys
import tarfile
import tempfile
from importlib import metadata
from pathlib import Path


def pytest_configure() -> None:
    import accelerate

    from fanfold.frameworks.accelerate import Accelerator

    accelerate.Accelerator = Accelerator


def main() -> int:
    version = metadata.version("accelerate")
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        download = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", ":all:", f"accelerate=={version}"]
        subprocess.run(download, cwd=folder, check=True)
        with tarfile.open(folder / f"accelerate-{version}.tar.gz") as archive:
            archive.extractall(folder, filter="data")
        return subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-rs", "-W", "ignore", "-p", "upstream", "tests/test_tracking.py"],
            cwd=folder / f"accelerate-{version}",
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]),
                "MLFLOW_ALLOW_FILE_STORE": "true",  # these tests need MLflow's file store, which is off by default
                "FANFOLD_DIR": str(folder / "runs"),
            },
        ).returncode


if __name__ == "__main__":
    sys.exit(main())
