"""No instruction of a wider set can reach a machine that lacks it. Run by ctest, on x86-64.

    check_objects.py objects ISA FILE...   one set's object files
    check_objects.py linked FILE           an executable that links them all, not stripped

An inline function that two sets share is merged by the linker, which keeps any one of the copies:
the AVX-512 one, say, on every machine. So each symbol that an object defines for others must lie in
the namespace of its set, nothing may run at load time, and no other code may use an instruction of
a wider set.
"""

import os
import re
import subprocess
import sys

NM = os.environ.get("NM", "nm")
OBJDUMP = os.environ.get("OBJDUMP", "objdump")
WIDE_SETS = ("avx2", "avx512")

# The mnemonics of AVX and later begin with v (vaddps), those of opmasks with k; BMI and MOVBE came
# with x86-64-v3 too. (tzcnt is missing on purpose: compilers emit it for older machines as well,
# which run it as bsf.)
WIDE_INSTRUCTION = re.compile(
    r"^\s*[0-9a-f]+:\s+(?:[a-z0-9.{}]+\s+)??"
    r"(v(?!err\b|erw\b)[a-z0-9]+|k(add|and|mov|n?or|x?n?or|not|shift|test|unpck)[a-z]+|"
    r"andn|bextr|bls(i|r|msk)|bzhi|mulx|pdep|pext|rorx|sarx|shlx|shrx|lzcnt|movbe)\s"
)


def run(*command):
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def defined_symbols(path):
    """(type letter, name) of each external symbol that path defines."""
    for line in run(NM, "-g", "--defined-only", "-C", path).splitlines():
        match = re.match(r"[0-9a-f]+ (\w) (.*)", line)
        if match:
            yield match.groups()


def wide_functions(path):
    """{function: first wide instruction} of path."""
    found, function = {}, None
    for line in run(OBJDUMP, "-d", "-C", "--no-show-raw-insn", path).splitlines():
        header = re.match(r"[0-9a-f]+ <(.*)>:$", line)
        if header:
            function = header[1]
        elif WIDE_INSTRUCTION.search(line):
            found.setdefault(function, line.strip())
    return found


def check_objects(isa, paths):
    for path in paths:
        inside = re.compile(rf"(?:(?:vtable|typeinfo|guard variable)\b.*\s)?linattn::{isa}::")
        for letter, name in defined_symbols(path):
            if not inside.search(name):
                yield f"{path}: defines {name} (nm: {letter}) outside linattn::{isa}"
        sections = run(OBJDUMP, "-h", path)
        if ".init_array" in sections or ".ctors" in sections:
            yield f"{path}: runs code at load time, before the instruction set is chosen"
        if isa not in WIDE_SETS:
            for function, line in wide_functions(path).items():
                yield f"{path}: {function} uses {line}"
        elif not wide_functions(path):
            yield f"{path}: no wide instruction at all: was it compiled with the flags of {isa}?"


def check_linked(path):
    wide = wide_functions(path)
    own = re.compile(rf"linattn::({'|'.join(WIDE_SETS)})::")
    for function, line in wide.items():
        if not own.search(function):
            yield f"{path}: {function} uses {line}"
    if not any(own.search(function) for function in wide):
        yield f"{path}: no wide kernels in it: stripped, or nothing linked?"


def main(mode, *arguments):
    problems = list(
        check_objects(arguments[0], arguments[1:])
        if mode == "objects"
        else check_linked(*arguments)
    )
    print("\n".join(problems) or "ok")
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
