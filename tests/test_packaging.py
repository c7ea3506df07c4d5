"""Test that one wheel has two import roots, both typed, and that the development install finds the same."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from configparser import ConfigParser
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
ROOTS = {"scarctl", "scarctl_adapters"}
ENTRY_POINTS = {
    "console_scripts": {"scarctl": "scarctl.cli.main:main"},
    "scarctl.adapters": {
        "deepspeed": "scarctl_adapters.deepspeed:DeepSpeedAdapter",
        "numpy": "scarctl_adapters.numpy:NumpyAdapter",
        **dict.fromkeys(("flax", "jax", "jaxlib", "scarctl_adapters"), "scarctl_adapters.jax:JaxAdapter"),
        "torch": "scarctl_adapters.torch:TorchAdapter",
        "torchrec": "scarctl_adapters.torchrec:TorchRecAdapter",
    },
}


def run(*arguments: str | Path, cwd: Path) -> str:
    """Return the standard output of an interpreter that sees installed packages, but not the working directory."""
    command = [sys.executable, "-I", *map(str, arguments)]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    run("-m", "build", "--wheel", "--no-isolation", "--outdir", folder, REPOSITORY, cwd=folder)
    (built,) = folder.glob("*.whl")
    return built


def names(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        return archive.namelist()


def test_the_wheel_has_exactly_two_import_roots(wheel: Path) -> None:
    roots = {name.partition("/")[0] for name in names(wheel)}
    (metadata,) = (root for root in roots if root.endswith(".dist-info"))
    assert roots == ROOTS | {metadata, metadata.replace(".dist-info", ".data")}


def test_the_wheel_is_pure_and_fits_every_python_3(wheel: Path) -> None:
    assert wheel.name.endswith("-py3-none-any.whl")


@pytest.mark.parametrize("root", sorted(ROOTS))
def test_both_roots_are_typed_regular_packages(wheel: Path, root: str) -> None:
    assert {f"{root}/__init__.py", f"{root}/py.typed"} <= set(names(wheel))


def test_the_wheel_holds_every_source_file_and_only_those(wheel: Path) -> None:
    sources = {
        file.relative_to(base).as_posix()
        for base, root in ((REPOSITORY, "scarctl"), (REPOSITORY / "adapters", "scarctl_adapters"))
        for file in (base / root).rglob("*")
        if file.suffix in (".py", ".css") or file.name == "py.typed"
    }
    outside = (".dist-info/", ".data/")
    assert {name for name in names(wheel) if not any(part in name for part in outside)} == sources


def test_the_wheel_installs_the_manual_page(wheel: Path) -> None:
    (page,) = (name for name in names(wheel) if ".data/" in name)
    assert page.endswith(".data/data/share/man/man1/scarctl.1")
    with zipfile.ZipFile(wheel) as archive:
        assert archive.read(page) == (REPOSITORY / "docs" / "scarctl.1").read_bytes()


def test_the_adapters_folder_is_no_package() -> None:
    # Another project's distribution owns the import name.
    assert not (REPOSITORY / "adapters" / "__init__.py").exists()


def test_entry_points(wheel: Path) -> None:
    (file,) = (name for name in names(wheel) if name.endswith(".dist-info/entry_points.txt"))
    parser = ConfigParser(delimiters="=")
    with zipfile.ZipFile(wheel) as archive:
        parser.read_string(archive.read(file).decode())
    assert {section: dict(parser[section]) for section in parser.sections()} == ENTRY_POINTS


def test_entry_points_load() -> None:
    found = entry_points(group="scarctl.adapters")
    assert {point.name for point in found} == set(ENTRY_POINTS["scarctl.adapters"])
    for point in found:
        framework = point.value.partition(":")[0].rpartition(".")[2]
        if framework in ("deepspeed", "jax", "torchrec") and find_spec(framework) is None:
            continue  # loaded only with a state of that framework
        assert point.load().__module__.partition(".")[0] == "scarctl_adapters"
    (script,) = entry_points(group="console_scripts", name="scarctl")
    assert callable(script.load())


def test_the_wheel_carries_the_licence(wheel: Path) -> None:
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names(wheel))


def test_versions_agree(wheel: Path, tmp_path: Path) -> None:
    program = f"import sys; sys.path.insert(0, {str(wheel)!r}); import scarctl; print(scarctl.__version__)"
    assert run("-c", program, cwd=tmp_path).strip() == wheel.name.split("-")[1]


def test_the_development_install_imports_both_roots_from_the_working_tree(tmp_path: Path) -> None:
    program = "import scarctl, scarctl_adapters as a; print(scarctl.__file__); print(a.__file__)"
    expected = [
        REPOSITORY / "scarctl" / "__init__.py",
        REPOSITORY / "adapters" / "scarctl_adapters" / "__init__.py",
    ]
    assert list(map(Path, run("-c", program, cwd=tmp_path).splitlines())) == expected
