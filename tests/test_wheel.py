"""The wheel holds every package, models included, and works away from the checkout."""

import shutil
import subprocess
import sys
import zipfile

from tests.ranks import ROOT


def test_the_wheel_imports_on_its_own(tmp_path):
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    # A copy, because setuptools puts into the wheel what an earlier build left beside the source.
    copy = shutil.copytree(ROOT, tmp_path / "source", ignore=shutil.ignore_patterns(".*", "build", "runs"))
    subprocess.run([*build, "--wheel-dir", str(tmp_path), str(copy)], check=True, cwd=tmp_path)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    packaged = {p.relative_to(tmp_path / "site" / "parallel2d") for p in (tmp_path / "site").rglob("*.py")}
    source = {p.relative_to(ROOT / "parallel2d") for p in (ROOT / "parallel2d").rglob("*.py")}
    models = {p.relative_to(ROOT) for p in (ROOT / "models").glob("*.py")}
    assert packaged == source | models
    assert (tmp_path / "site" / "parallel2d" / "planner" / "hardware.yaml").is_file()
    script = (
        "import sys; sys.path.insert(0, 'site'); import parallel2d, parallel2d.models.llama as m;"
        "print(parallel2d.__file__, m.__file__)"
    )
    run = subprocess.run(
        [sys.executable, "-c", script], check=True, cwd=tmp_path, capture_output=True, text=True
    )
    assert run.stdout.count(str(tmp_path)) == 2
