"""Environments of the clients: one each, so that no client has a package that another one or Tandem brought along."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

FOLDER = Path(".venv-clients")
_STAMP = ".stamp"
_INSTALL_S = 900.0


class InstallError(Exception):
    """The text has pip's own last lines."""


@dataclass(frozen=True, slots=True)
class Environment:
    """A virtual environment in `folder`."""

    name: str
    packages: tuple[str, ...]
    """Pinned. Their requirements are taken as they are, as a user of the client would have them."""
    distribution: str
    """The one whose version is the client's."""
    megabytes: int
    """About, on disk."""
    alters: tuple[str, ...] = ()
    """Packages that are taken out again."""
    alias: str = ""
    """A further name under which the distribution is found, and where it is another one, its version: vllm, vllm==0.32.0+cpu."""
    folder: Path = FOLDER

    @property
    def path(self) -> Path:
        return self.folder.absolute() / self.name

    @property
    def python(self) -> Path:
        return self.path / "bin" / "python"

    @property
    def is_there(self) -> bool:
        stamp = self.path / _STAMP
        return stamp.is_file() and stamp.read_text() == self._stamp()

    def _stamp(self) -> str:
        return "\n".join((*self.packages, *(f"-{name}" for name in self.alters), self.alias))

    def install(self) -> None:
        """Nothing to do where it is there. Raises InstallError."""
        if self.is_there:
            return
        began_s = time.monotonic()
        shutil.rmtree(self.path, ignore_errors=True)
        _run([sys.executable, "-m", "venv", str(self.path)])
        self._pip_install()
        if self.alters:
            _run([str(self.python), "-m", "pip", "uninstall", "-q", "-y", *self.alters])
        if self.alias:
            self._add_alias()
        (self.path / _STAMP).write_text(self._stamp())
        print(f"  {', '.join(self.packages)}: installed in {time.monotonic() - began_s:.0f} s, {_megabytes(self.path)} MB", flush=True)

    def _pip_install(self) -> None:
        command = [str(self.python), "-m", "pip", "install", "-q", "--disable-pip-version-check", *self.packages]
        if index := os.environ.get("TORCH_INDEX"):
            command += ["--extra-index-url", index]
        if not (torch := _own_torch()):
            _run(command)
            return
        # Where Tandem has a build of torch for CPUs, a client that asks for any torch gets the same one, and not gigabytes of CUDA.
        constraints = self.path / "constraints.txt"
        constraints.write_text(f"torch=={torch}\n")
        try:
            _run([*command, "-c", str(constraints)])
        except InstallError:
            print(f"  {self.name}: not with torch {torch} (TORCH_INDEX names an index that has it); taking what pip finds", flush=True)
            _run(command)

    def _add_alias(self) -> None:
        ask = "import sysconfig; print(sysconfig.get_paths()['purelib'])"
        site = Path(_run([str(self.python), "-c", ask]).strip())
        name, _, other = self.alias.partition("==")
        number = other or self.packages[0].partition("==")[2]
        folder = site / f"{name}-{number.partition('+')[0]}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {number}\n")


def _own_torch() -> str:
    """Of this environment, where it is one without CUDA."""
    try:
        found = version("torch")
    except PackageNotFoundError:
        return ""
    return found if found.endswith("+cpu") else ""


def build_wheel(into: Path) -> Path:
    """Tandem's wheel. Raises InstallError."""
    shutil.rmtree(into, ignore_errors=True)
    _run([sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(into), "."])
    return next(into.glob("*.whl")).absolute()


def install_wheel(environment: Environment, wheel: Path) -> None:
    """Every time: its version says nothing of its content. Raises InstallError."""
    _run([str(environment.python), "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-deps", "--force-reinstall", str(wheel)])


def _megabytes(folder: Path) -> int:
    return sum(path.lstat().st_size for path in folder.rglob("*") if not path.is_symlink()) >> 20


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_INSTALL_S)
    except subprocess.TimeoutExpired:
        raise InstallError(f"{' '.join(command)}: not done after {_INSTALL_S:g} s") from None
    if done.returncode:
        raise InstallError(f"{' '.join(command)} ended with {done.returncode}:\n" + "\n".join(done.stderr.splitlines()[-20:]))
    return done.stdout
