"""Arrays in files: mapped into memory to be read, and written under a temporary name.

Three formats: `.npy`, `.npz` and `.safetensors`. Nothing is loaded whole: what is stored as it is
stays in its file, and what is compressed is unpacked beside it into a temporary one.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import mmap
import os
import shutil
import struct
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Annotated, Any, BinaryIO

import numpy as np
import typer

from ._failure import Failure, brought, fail

__all__ = [
    "Given",
    "Input",
    "Output",
    "checked_output",
    "clashes",
    "inputs",
    "read",
    "replacing",
    "size_of",
]

Array = Any

FORMATS = (".npy", ".npz", ".safetensors")
_SAFETENSORS = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U64": "uint64",
    "U32": "uint32",
    "U16": "uint16",
    "U8": "uint8",
    "BOOL": "bool",
}
_NAMES = {name: code for code, name in _SAFETENSORS.items()}

Given = Annotated[  # of commands that make arrays of their own where none are given
    list[str] | None,
    typer.Argument(
        metavar="Q K V",
        help="Arrays to take: three files, or one that holds q, k and v. Without: random ones.",
    ),
]


@dataclass
class Input:
    """An array in a file, as read-only memory that the system fetches where it is touched."""

    array: Array
    path: str
    member: str | None = None
    mapping: mmap.mmap | None = None

    def __str__(self) -> str:
        return self.path if self.member is None else f"{self.path}:{self.member}"

    def release(self) -> None:
        """Let go of the pages read so far; they are fetched again where they are touched again."""
        if self.mapping is not None and hasattr(mmap, "MADV_DONTNEED"):
            self.mapping.madvise(mmap.MADV_DONTNEED)


# Reading


def inputs(files: Sequence[str], names: Sequence[str], scratch: str) -> list[Input]:
    """The arrays of these names: a file each, or one .npz or .safetensors that holds them all.

    scratch: a folder for what has to be unpacked
    """
    if len(files) == len(names):
        return [read(file, name, scratch) for file, name in zip(files, names, strict=True)]
    if len(files) != 1:
        raise Failure(
            f"expected {len(names)} files ({', '.join(names)}), or one .npz or .safetensors file "
            f"that holds {_list(names)}; got {len(files)}",
            2,
        )
    path = files[0]
    if _format(path) == ".npy":
        fail(
            f"{path}: one .npy file holds one array; expected {len(names)} files "
            f"({', '.join(names)}), or one .npz or .safetensors file that holds {_list(names)}"
        )
    return [_member(path, None, name, scratch, alone=False) for name in names]


def read(file: str, name: str, scratch: str) -> Input:
    """One array: FILE, or FILE:NAME for one of several in it; `name` is what it is wanted as."""
    path, member = file, None
    if not os.path.exists(file) and ":" in file:
        path, member = file.rsplit(":", 1)
    if _format(path) == ".npy":
        if member is not None:
            fail(f"{path}: a .npy file has no members, so none named {member!r}")
        return _npy(path)
    return _member(path, member, name, scratch)


def _format(path: str) -> str:
    """The format of a file, by its first bytes; errors if there is no such file or format."""
    if os.path.exists(path) and not os.path.isfile(path):
        fail(f"{path}: expected a file, got {'a folder' if os.path.isdir(path) else 'a device'}")
    with open(path, "rb") as file:
        start = file.read(8)
    suffix = os.path.splitext(path)[1].lower()
    if start.startswith(b"\x93NUMPY"):
        return ".npy"
    if start.startswith((b"PK\x03\x04", b"PK\x05\x06")):
        return ".npz"
    if suffix == ".safetensors":
        return suffix
    if suffix in FORMATS:
        fail(f"{path}: not a {suffix} file, or a damaged one: it starts with {start[:6]!r}")
    fail(f"{path}: expected a {_list(FORMATS, 'or')} file")


def _member(path: str, member: str | None, name: str, scratch: str, alone: bool = True) -> Input:
    """The array `member` of a file that holds several; None: the one called `name`.

    alone: a single one may have any name
    """
    with _reading(path):
        if _format(path) == ".npz":
            with zipfile.ZipFile(path) as archive:
                found = [n.removesuffix(".npy") for n in archive.namelist()]
                member = _choose(path, found, member, name, alone)
                return _npz(path, archive, member, scratch)
        entries = _header(path)
        member = _choose(path, list(entries), member, name, alone)
        return _safetensors(path, member, entries[member])


def _choose(path: str, found: list[str], member: str | None, name: str, alone: bool) -> str:
    listed = ", ".join(map(repr, found[:8])) + (", …" if len(found) > 8 else "")
    if member is not None:
        if member in found:
            return member
        fail(f"{path}: no array named {member!r}; it holds {listed or 'none'}")
    alike = [n for n in found if n.lower() == name.lower()]
    if len(alike) == 1:
        return alike[0]
    if alone and len(found) == 1:
        return found[0]
    fail(f"{path}: no array named {name!r}; it holds {listed or 'none'}; choose one as {path}:NAME")


def _npy(path: str) -> Input:
    with _reading(path), open(path, "rb") as file:
        shape, fortran, dtype = _npy_header(file)
        return _mapped(path, None, file.tell(), dtype, shape, fortran)


def _npy_header(file: Any) -> tuple[tuple[int, ...], bool, Any]:
    version = np.lib.format.read_magic(file)
    if version == (1, 0):
        shape, fortran, dtype = np.lib.format.read_array_header_1_0(file)
    elif version == (2, 0):
        shape, fortran, dtype = np.lib.format.read_array_header_2_0(file)
    else:
        raise ValueError(f"format version {version[0]}.{version[1]} is not for plain numbers")
    if dtype.hasobject:
        raise ValueError("it holds Python objects, not numbers")
    return shape, fortran, dtype


def _npz(path: str, archive: zipfile.ZipFile, member: str, scratch: str) -> Input:
    name = member if member in archive.namelist() else f"{member}.npy"
    info = archive.getinfo(name)
    if info.compress_type != zipfile.ZIP_STORED:
        handle, unpacked = tempfile.mkstemp(dir=scratch, suffix=".npy")
        with os.fdopen(handle, "wb") as target, archive.open(info) as source:
            shutil.copyfileobj(source, target, 1 << 20)
        found = _npy(unpacked)
        return Input(found.array, path, member, found.mapping)
    with archive.open(info) as source:  # reads to the end, for the check sum
        while source.read(1 << 20):
            pass
    with open(path, "rb") as file:
        # The array starts behind the local header, whose two lengths may differ from the list's.
        file.seek(info.header_offset)
        local = file.read(30)
        file.seek(info.header_offset + 30 + sum(struct.unpack("<HH", local[26:30])))
        shape, fortran, dtype = _npy_header(file)
        return _mapped(path, member, file.tell(), dtype, shape, fortran)


def _header(path: str) -> dict[str, dict[str, Any]]:
    """The entries of a .safetensors file, whose own package has found them sound."""
    package = brought("safetensors", "'linattn[cli]'", "a .safetensors file")
    with package.safe_open(path, framework="np"):
        pass
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        entries: dict[str, dict[str, Any]] = json.loads(file.read(length))
    entries.pop("__metadata__", None)
    for entry in entries.values():
        entry["data_offsets"] = [8 + length + offset for offset in entry["data_offsets"]]
    return entries


def _safetensors(path: str, member: str, entry: dict[str, Any]) -> Input:
    name = _SAFETENSORS.get(entry["dtype"])
    if name is None:
        fail(f"{path}: {member} has dtype {entry['dtype']}; expected F64, F32, F16 or BF16")
    dtype = np.dtype(_bfloat16(path) if name == "bfloat16" else name).newbyteorder("<")
    return _mapped(path, member, entry["data_offsets"][0], dtype, tuple(entry["shape"]), False)


def _bfloat16(path: str) -> Any:
    return brought("ml_dtypes", "'linattn[cli]'", f"{path}: bfloat16").bfloat16


def _mapped(
    path: str, member: str | None, offset: int, dtype: Any, shape: tuple[int, ...], fortran: bool
) -> Input:
    end = offset + math.prod(shape) * dtype.itemsize
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size < end:  # touching memory behind the end of a file would end the process
            fail(f"{path}: cut short: {end:,} bytes expected, {size:,} there")
        mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    order: Any = "F" if fortran else "C"
    array = np.ndarray(shape, dtype, mapping, offset, order=order)
    return Input(array, path, member, mapping)


@contextlib.contextmanager
def _reading(path: str) -> Iterator[None]:
    """Words what a reader makes of a damaged file, which may be almost any exception."""
    try:
        yield
    except Failure:
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.filename is not None:
            raise
        said = (str(error).splitlines() or [type(error).__name__])[0]
        raise Failure(f"{path}: damaged, or not what its name says: {said}") from error


# Writing


def checked_output(path: str, what: str, formats: Sequence[str] = FORMATS) -> str:
    """The file to write, by the name it was given; errors where that cannot go well."""
    suffix = os.path.splitext(path)[1].lower()
    if suffix not in formats:
        fail(f"{what} {path}: expected a name that ends in {_list(formats, 'or')}")
    folder = os.path.dirname(os.path.realpath(path))
    if not os.path.isdir(folder):
        fail(f"{what} {path}: there is no folder {folder}")
    if os.path.exists(path) and not os.path.isfile(path):
        fail(f"{what} {path}: exists and is no regular file")
    return path


def clashes(output: str, what: str, others: dict[str, str | None]) -> None:
    """An error if the output is the same file as one of the others."""
    for name, other in others.items():
        if other is None:
            continue
        if os.path.realpath(other) == os.path.realpath(output) or (
            os.path.exists(output) and os.path.exists(other) and os.path.samefile(output, other)
        ):
            fail(f"{what} {output}: is the same file as {name}; nothing was read or written")


class Output:
    """A file of one array, filled in pieces under a temporary name, then renamed.

    with Output(path, shape, dtype) as file: file.write(0, block); ...; file.commit()

    Without `commit` nothing is left, neither under the final name nor under the temporary one.
    """

    def __init__(self, path: str, shape: tuple[int, ...], dtype: Any, what: str = "-o") -> None:
        self.path = path
        self.what = what
        self.nbytes = math.prod(shape) * dtype.itemsize
        self._format = os.path.splitext(path)[1].lower()
        self._itemsize = dtype.itemsize
        self._temporary: str | None = None
        header = _start_of_file(path, self._format, shape, dtype)
        self._start = len(header)
        with self._worded():
            handle, self._temporary = _temporary_beside(path)
            self._file: BinaryIO = open(handle, "wb", buffering=0)
            try:
                self._reserve(self._start + self.nbytes)
                self._put(0, header)
            except BaseException:
                self.__exit__(None, None, None)
                raise

    def __enter__(self) -> Output:
        return self

    def write(self, element: int, block: Array) -> None:
        """Put a block at this element, counted in the order of the file."""
        if block.size:
            data: Any = np.ascontiguousarray(block).reshape(-1).view(np.uint8)
            with self._worded():
                self._put(self._start + element * self._itemsize, memoryview(data))

    def finish(self) -> None:
        """Everything is on the disk; only the name is missing."""
        with self._worded():
            if self._format == ".npz":
                self._pack()
            os.fsync(self._file.fileno())
            self._file.close()

    def commit(self) -> None:
        """Give the file its name."""
        if not self._file.closed:
            self.finish()
        assert self._temporary is not None
        with self._worded():
            _named(self._temporary, self.path)
            self._temporary = None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()
        if self._temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(self._temporary)
            self._temporary = None

    def _put(self, offset: int, data: bytes | memoryview) -> None:
        self._file.seek(offset)
        view = memoryview(data)
        while view.nbytes:
            view = view[self._file.write(view) :]

    def _reserve(self, size: int) -> None:
        """Have a full disk show now rather than after hours."""
        if hasattr(os, "posix_fallocate"):
            try:
                os.posix_fallocate(self._file.fileno(), 0, size)
                return
            except OSError as error:
                if error.errno not in _NO_RESERVE:
                    raise
        self._file.truncate(size)

    def _pack(self) -> None:
        """The .npy file so far, as the only member of an .npz file."""
        assert self._temporary is not None
        handle, packed = _temporary_beside(self.path)
        try:
            file = open(handle, "w+b", buffering=0)
            with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
                archive.write(self._temporary, "out.npy")
        except BaseException:
            os.unlink(packed)
            raise
        self._file.close()
        os.unlink(self._temporary)
        self._file, self._temporary = file, packed

    @contextlib.contextmanager
    def _worded(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise Failure(
                f"{self.what} {self.path}: {error.strerror or error} ({size_of(self.nbytes)} to "
                "write); nothing was written"
            ) from error


@contextlib.contextmanager
def replacing(path: str, what: str) -> Iterator[BinaryIO]:
    """A small file to write, which appears under its name when all of it is there."""
    try:
        handle, temporary = _temporary_beside(path)
        try:
            with os.fdopen(handle, "wb") as file:
                yield file
            _named(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise
    except OSError as error:
        fail(f"{what} {path}: {error.strerror or error}; nothing was written")


def _named(temporary: str, path: str) -> None:
    """Give a complete file its name, and the rights of a new file rather than a private one.

    Where the name is a link, its target is replaced.
    """
    mask = os.umask(0)
    os.umask(mask)
    os.chmod(temporary, 0o666 & ~mask)
    os.replace(temporary, os.path.realpath(path))


def _errnos() -> frozenset[int]:
    import errno

    return frozenset(
        getattr(errno, name) for name in ("EINVAL", "ENODEV", "ENOSYS", "EOPNOTSUPP", "ESPIPE")
        if hasattr(errno, name)
    )  # fmt: skip


_NO_RESERVE = _errnos()  # the file system cannot


def _temporary_beside(path: str) -> tuple[int, str]:
    folder = os.path.dirname(os.path.realpath(path))
    return tempfile.mkstemp(dir=folder, prefix=".linattn-", suffix=".part")


def _start_of_file(path: str, suffix: str, shape: tuple[int, ...], dtype: Any) -> bytes:
    """What stands before the numbers."""
    if suffix == ".safetensors":
        nbytes = math.prod(shape) * dtype.itemsize
        entry = {"dtype": _NAMES[dtype.name], "shape": list(shape), "data_offsets": [0, nbytes]}
        text = json.dumps({"out": entry}, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text
    if dtype.name == "bfloat16":
        fail(f"{path}: NumPy's formats have no bfloat16; choose a name ending in .safetensors")
    header = io.BytesIO()
    about = {
        "descr": np.lib.format.dtype_to_descr(dtype),
        "fortran_order": False,
        "shape": shape,
    }
    np.lib.format.write_array_header_1_0(header, about)
    return header.getvalue()


def size_of(nbytes: float) -> str:
    """Bytes for people."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1000:
            return f"{nbytes:.0f} B" if unit == "B" else f"{nbytes:.3g} {unit}"
        nbytes /= 1024
    return f"{nbytes:,.3g} TiB"


def _list(names: Sequence[str], last: str = "and") -> str:
    return ", ".join(names[:-1]) + f" {last} {names[-1]}" if len(names) > 1 else names[0]
