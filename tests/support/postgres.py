"""A PostgreSQL server of Debian's package, in a folder of its own, on loopback."""

import os
import pwd
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import mkdtemp

from serving.simulation.ports import free_port

BINARIES = next(
    (path.parent for path in sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), reverse=True)), None
)


@contextmanager
def postgres() -> Iterator[str]:
    """The URL of an empty database."""
    assert BINARIES, "no PostgreSQL here; Debian has it: apt-get install postgresql"
    folder = Path(mkdtemp(prefix="svpg"))
    user = None
    if os.geteuid() == 0:  # the server refuses to be root
        user = "postgres"
        account = pwd.getpwnam(user)
        os.chown(folder, account.pw_uid, account.pw_gid)
    data = folder / "data"
    port = str(free_port())

    def run(program: str, *arguments: str) -> None:
        command = [str(BINARIES / program), "-D", str(data), *arguments]
        with (folder / "out").open("ab") as out:
            subprocess.run(command, check=True, user=user, cwd=folder, stdout=out, stderr=out, timeout=60)

    try:
        run("initdb", "-A", "trust", "-U", "serving", "--no-sync")
        listen = f"-p {port} -k {folder} -c listen_addresses=127.0.0.1"
        run("pg_ctl", "-w", "-l", str(folder / "log"), "-o", listen, "start")
        try:
            yield f"postgresql://serving@127.0.0.1:{port}/postgres"
        finally:
            run("pg_ctl", "-w", "-m", "immediate", "stop")
    finally:
        shutil.rmtree(folder)
