"""`agentrl view`: write or serve the page of one or two runs, or list the runs of a folder."""

from __future__ import annotations

import errno
from pathlib import Path

from lightning_agentrl.commands.files import PAGE, make_room_for
from lightning_agentrl.run_files import find_run, several
from lightning_agentrl.tools.view.build import build_page, page_file
from lightning_agentrl.tools.view.listing import list_runs
from lightning_agentrl.tools.view.serve import PageServer

PORT = 8002  # a fixed port, since browsers store stars and notes by the address of a page


def view_runs(
    run: Path,
    other: Path | None = None,
    out: Path | None = None,
    last: int | None = None,
    serve: bool = False,
    port: int | None = None,
) -> None:
    """Write the run viewer: one offline page of a run or of two runs; list the runs of a folder with several runs.

    Args:
        run: folder of a run with the callback TurnLog, or a folder of runs to list.
        other: folder of a second run, to compare.
        out: file of the page. Default: view.html in the folder of the run, or compare.html for two runs.
        last: number of last iterations to show. Default: all.
        serve: serve the page to browsers of this machine and update the page while the run trains.
        port: port of --serve, or 0 for a free port. Default: 8002. Browsers store stars and notes per port.

    Raises:
        ValueError: the folders contain no run, or arguments contradict each other.
    """
    if serve and out is not None:
        raise ValueError("a page is either served or written: give --serve or --out, not both")
    if not serve and port is not None:
        raise ValueError("--port needs --serve; add --serve, or leave --port out")
    if other is None and out is None and not serve and last is None and run.is_dir() and several(run):
        print(list_runs(run))
    elif serve:
        for each in filter(None, (run, other)):
            if each.is_dir() and several(each):
                find_run(each)  # a folder without a single run raises an error that lists the runs
        _offer(run, other, last, PORT if port is None else port)
    else:
        page = page_file(run, out, other)
        if page.parent.is_dir():
            make_room_for(page, PAGE, "out")
        print(f"written to {build_page(run, out, last, other)}")


def _offer(run: Path, other: Path | None, last: int | None, port: int) -> None:
    try:
        server = PageServer(run, other, last, port)
    except (OSError, OverflowError) as error:
        if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
            raise ValueError(
                f"port {port} is in use, maybe by the page of another run; end that, or choose another port. Always "
                "use the same port for this run, since a browser stores stars and notes by it (argument --port)"
            ) from error
        raise ValueError(
            f"cannot listen on port {port} ({error}); choose another one, or 0 for a free one (argument --port)"
        ) from error
    with server:
        print(f"live at {server.address} until Ctrl-C; only this machine can open it", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print("ended")
