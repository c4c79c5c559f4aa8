"""The server of a live page: what it answers, and to whom."""

from __future__ import annotations

import html
import http.client
import os
import shutil
import socket
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lightning_agentrl.run_files import find_runs
from lightning_agentrl.tools.view.serve import PageServer
from tests.tools.view.logs import make_turn, write_log


@pytest.fixture
def server(tmp_path: Path) -> Iterator[PageServer]:
    with PageServer(tmp_path) as made:
        threading.Thread(target=made.serve_forever, daemon=True).start()
        yield made
        made.shutdown()


def ask(server: PageServer, path: str, host: str = "", method: str = "GET") -> tuple[int, str]:
    connection = http.client.HTTPConnection(*server.server_address[:2], timeout=20)
    connection.request(method, path, headers={"Host": host or f"127.0.0.1:{server.server_address[1]}"})
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, text


def test_it_listens_on_the_loopback_and_gives_one_page_only(server: PageServer, tmp_path: Path) -> None:
    assert server.socket.getsockname()[0] == "127.0.0.1"
    (tmp_path / "secret.txt").write_text("secret")
    for path in ("/secret.txt", "/../secret.txt", "//etc/passwd", "/?x"):
        assert ask(server, path)[0] == 404
    assert ask(server, "/", method="POST")[0] == 501
    assert ask(server, "/", host="example.org:80")[0] == 403  # a name that leads here, used by a page of elsewhere


def test_the_page_is_made_anew_when_its_files_have_changed(server: PageServer, tmp_path: Path) -> None:
    assert "Nothing to show yet" in ask(server, "/")[1]
    write_log(tmp_path, [make_turn(observation="first")])
    stamp, page = ask(server, "/stamp")[1], ask(server, "/")[1]
    assert f'"stamp":"{stamp}"' in page
    assert ask(server, "/")[1] == page
    write_log(tmp_path, [make_turn(observation="first"), make_turn(turn=1)])
    assert ask(server, "/stamp")[1] != stamp
    assert '"turns":2' in ask(server, "/")[1]


def test_names_that_are_no_utf8_are_shown(tmp_path: Path) -> None:
    run = tmp_path / os.fsdecode(b"m\xfcller")
    with PageServer(run) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        assert "m\\udcfcller' does not exist" in html.unescape(ask(server, "/")[1])
        write_log(run, [make_turn()])
        assert "<title>m\\udcfcller" in ask(server, "/")[1]
        server.shutdown()


def test_a_port_that_is_taken_is_refused(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(OSError, match="in use"):
        PageServer(tmp_path, port=taken.getsockname()[1])


def test_a_port_that_browsers_leave_out_is_answered(server: PageServer) -> None:
    assert ask(server, "/stamp", host="127.0.0.1")[0] == 200  # of port 80 no browser tells the number


def test_a_browser_that_leaves_is_no_news(server: PageServer, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    write_log(tmp_path, [make_turn()] * 3000)  # takes longer to show than the browser waits
    with socket.create_connection(("127.0.0.1", server.server_address[1])) as browser:
        browser.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset at its end
        browser.sendall(f"GET / HTTP/1.0\r\nHost: 127.0.0.1:{server.server_address[1]}\r\n\r\n".encode())
    server.page()  # has to wait for that of the browser
    time.sleep(0.2)
    assert capsys.readouterr().err == ""


def test_folders_of_a_run_may_go_while_they_are_looked_at(tmp_path: Path) -> None:
    write_log(tmp_path, [make_turn()])
    checkpoint, ended = tmp_path / "last.ckpt", threading.Event()

    def save() -> None:
        while not ended.is_set():
            (checkpoint / "of_a_rank").mkdir(parents=True, exist_ok=True)
            shutil.rmtree(checkpoint)

    with PageServer(tmp_path) as server:
        saving = threading.Thread(target=save)
        saving.start()
        try:
            assert all(server.stamp() for _ in range(1000))
            assert all(find_runs(tmp_path) == [tmp_path] for _ in range(1000))
        finally:
            ended.set()
            saving.join()


def test_a_file_that_goes_while_the_page_is_made_is_waited_for(
    server: PageServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(*_: object) -> str:
        raise FileNotFoundError("config.yaml")

    monkeypatch.setattr("lightning_agentrl.tools.view.serve.page_of", gone)
    assert "Nothing to show yet: config.yaml" in ask(server, "/")[1]


def test_a_number_of_iterations_that_shows_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--last must be at least 1"):
        PageServer(tmp_path, last=0)
