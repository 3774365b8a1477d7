"""The wheel, installed into an environment of its own: all of the package, under no name but its own."""

import json
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("bench", "executors", "kernels", "models", "paged", "serving")
IGNORED = shutil.ignore_patterns(".*", "*.egg-info", "__pycache__", "build", "results", "tests")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, as building leaves files in the source tree.

    The copy is a git repository, whose files setuptools-scm lists, with such a list of an earlier build.
    """
    folder = tmp_path_factory.mktemp("wheel")
    shutil.copytree(ROOT, folder / "source", symlinks=True, ignore=IGNORED)
    git = ["git", "-C", str(folder / "source")]
    for command in (["init", "--quiet"], ["add", "--all"]):
        subprocess.run([*git, *command], check=True)
    listed = subprocess.run([*git, "ls-files"], check=True, capture_output=True, text=True).stdout
    assert "paged/kernels\n" in listed  # a link
    (folder / "source" / "paged.egg-info").mkdir()
    (folder / "source" / "paged.egg-info" / "SOURCES.txt").write_text(listed)
    try:
        has_backend = int(version("setuptools").partition(".")[0]) >= 77
    except PackageNotFoundError:
        has_backend = False
    isolation = ["--no-build-isolation"] if has_backend else []  # isolation downloads the build backend
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", *isolation]
    subprocess.run([*pip, str(folder / "source"), "--wheel-dir", str(folder)], check=True)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its folder of programs. Torch and the others come from the environment that runs the tests, and a package named
    `kernels` is there first."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder)
    site = Path(sysconfig.get_path("purelib", "venv", {"base": str(folder), "platbase": str(folder)}))
    (site / "kernels").mkdir()
    (site / "kernels" / "__init__.py").write_text("owner = 'somebody else'\n")
    # Plain paths, whose own .pth files are not read: an editable install there does not come along.
    (site / "others.pth").write_text("\n".join(path for path in sys.path if path.endswith("-packages")))
    programs = folder / "bin"
    pip = [sys.executable, "-m", "pip", "--python", str(programs / "python"), "install", "--quiet"]
    # Without PYTHONPATH: a paged that lies there would count as installed.
    subprocess.run([*pip, "--no-deps", "--no-index", str(wheel)], env={}, check=True)
    return programs


def run(environment: Path, folder: Path, program: str, *arguments: str) -> str:
    """What a program of the environment prints, called in another folder."""
    command = [str(environment / program), *arguments]
    environ = {"OMP_NUM_THREADS": "1"}  # threads that await busy cores take longer than the work
    return subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, check=True).stdout


@pytest.mark.thorough
def test_it_holds_every_module_and_nothing_else(wheel: Path) -> None:
    """In 1.8 MB, of which the bundled checkpoint is 0.7; benchmarks, 0.2, are what `paged verify` checks with."""
    assert wheel.stat().st_size < 2_500_000
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
    sources = {
        f"{'' if folder == 'paged' else 'paged/'}{path.relative_to(ROOT)}"
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*.py")
    }
    assert {name for name in packed if name.endswith(".py")} == sources
    assert {name.partition("/")[0] for name in packed} == {"paged"}
    assert {"paged/py.typed", "paged/models/recall/model.safetensors", "paged/bench/report/report.html"} <= packed
    assert "paged/serving/http/page.html" in packed


@pytest.mark.thorough
def test_it_imports_beside_a_package_named_kernels(environment: Path, tmp_path: Path) -> None:
    code = "import kernels, paged, paged.kernels.layers.rms_norm; print(kernels.owner); print(paged.__file__)"
    owner, file = run(environment, tmp_path, "python", "-c", code).splitlines()
    assert owner == "somebody else"
    assert Path(file).is_relative_to(environment.parent)


@pytest.mark.thorough
def test_its_commands_run(environment: Path, tmp_path: Path) -> None:
    generated = json.loads(run(environment, tmp_path, "paged", "generate", "--count", "2", "--json"))
    assert generated["summary"]["correct"] == 2
    verified = json.loads(run(environment, tmp_path, "paged", "verify", "--quick", "--only", "norm", "--json"))
    assert verified["wrong"] == 0
    assert len(verified["rows"]) > 2
    assert "kernels " in run(environment, tmp_path, "paged", "bench")
