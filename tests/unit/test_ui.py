"""`shardwise ui`: one browser on this machine, let in once; predictions, faults and runs; nothing written elsewhere."""

from __future__ import annotations

import http.client
import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from simulator.cli import main
from simulator.cli.ui_runs import Runs, words
from simulator.cli.ui_server import MOST_BYTES, Server
from simulator.formats.study import read_study
from simulator.predict import predict
from tests.browser import CHROMIUM, Browser
from tests.pages import inside

STUDY = 'model = "llama3.2-1b"\ncluster = "hgx-h100-8"\n[plan]\nseq_len = 512\n'


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    folder = tmp_path / "runs"
    folder.mkdir()
    one = Server(Runs(folder, tmp_path), STUDY, "a.toml", 0)
    thread = threading.Thread(target=one.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield one
    one.shutdown()
    one.close()
    thread.join()


class Client:
    """What a browser does, and what it would not."""

    def __init__(self, server: Server) -> None:
        self.server, self.cookie = server, ""

    def ask(
        self, method: str, path: str, body: Any = None, *, host: str = "", headers: dict[str, str] | None = None
    ) -> tuple[int, str, dict[str, str]]:
        connection = http.client.HTTPConnection("127.0.0.1", self.server.server_port, timeout=30)
        text = None if body is None else body if isinstance(body, str) else json.dumps(body)
        told = {"Host": host or self.server.hosts[0], "Cookie": self.cookie}
        told |= {"Content-Type": "application/json"} if text is not None else {}
        connection.request(method, path, text, told | (headers or {}))
        answer = connection.getresponse()
        found = answer.status, answer.read().decode(), dict(answer.getheaders())
        connection.close()
        return found

    def enter(self) -> None:
        status, _, headers = self.ask("GET", self.server.address.partition(str(self.server.server_port))[2])
        assert (status, headers["Location"]) == (303, "/")
        cookie = headers["Set-Cookie"]
        assert "HttpOnly" in cookie
        assert "SameSite=Strict" in cookie
        self.cookie = cookie.partition(";")[0]


@pytest.fixture
def client(server: Server) -> Client:
    return Client(server)


def test_it_listens_on_this_machine_only(server: Server) -> None:
    assert server.socket.getsockname()[0] == "127.0.0.1"


def test_a_token_opens_it_once_and_nothing_is_answered_without(client: Client) -> None:
    address = client.server.address.partition(str(client.server.server_port))[2]
    for path in ("/", "/runs", "/report/1", "/?token=wrong", "/?token="):
        assert client.ask("GET", path)[0] == 403
    assert client.ask("POST", "/predict", {"text": STUDY})[0] == 403
    client.enter()
    assert client.ask("GET", "/")[0] == 200
    assert Client(client.server).ask("GET", address)[0] == 403
    client.cookie = "shardwise=guessed"
    assert client.ask("GET", "/")[0] == 403


def test_other_names_and_other_pages_are_refused(client: Client) -> None:
    client.enter()
    assert client.ask("GET", "/", host="evil.example")[0] == 421
    assert client.ask("GET", "/", host=f"evil.example:{client.server.server_port}")[0] == 421
    assert client.ask("POST", "/predict", {"text": STUDY}, host="evil.example")[0] == 421
    assert client.ask("POST", "/predict", {"text": STUDY}, headers={"Origin": "http://evil.example"})[0] == 403
    assert client.ask("POST", "/predict", {"text": STUDY}, headers={"Origin": "null"})[0] == 403
    assert (
        client.ask("POST", "/predict", "text=1", headers={"Content-Type": "application/x-www-form-urlencoded"})[0]
        == 415
    )
    own = f"http://{client.server.hosts[0]}"
    assert client.ask("POST", "/predict", {"text": STUDY}, headers={"Origin": own})[0] == 200


def test_bad_requests_are_answered(client: Client) -> None:
    client.enter()
    for body in ("", "{", "[]", '{"text": 3}', "[" * 100_000):
        assert client.ask("POST", "/predict", body)[0] in (400, 415)
    assert client.ask("POST", "/predict", {"text": "x" * MOST_BYTES})[0] == 413
    for path in ("/x", "/../../etc/passwd", "/report/0", "/report/x", f"/report/{'9' * 40}", "/runs/../x"):
        assert client.ask("GET", path)[0] == 404
    assert client.ask("POST", "/elsewhere", {"text": ""})[0] == 404
    assert client.ask("POST", "/keep", {"text": "", "number": 7})[0] == 404
    assert client.ask("DELETE", "/")[0] == 501
    assert json.loads(client.ask("POST", "/predict", '{"text": "\\ud800"}')[1])["faults"]


def test_a_text_is_predicted_and_its_page_is_that_of_predict(client: Client) -> None:
    client.enter()
    told = json.loads(client.ask("POST", "/predict", {"text": STUDY})[1])
    asked = read_study(None, {"model": "llama3.2-1b", "cluster": "hgx-h100-8"}, {}, ("plan.seq_len=512",))
    expected = predict(asked.model, asked.plan, asked.cluster, asked.calibration, asked.stack)
    assert told["answer"]["step_s"] == expected.step_s
    status, text, headers = client.ask("GET", f"/report/{told['number']}")
    assert status == 200
    assert headers["X-Frame-Options"] == "SAMEORIGIN"
    assert inside(text, "answer") == told["answer"]


def test_faults_name_their_keys_and_no_path_of_ours(client: Client) -> None:
    client.enter()
    text = STUDY.replace("512", '"a"') + "foo = 1\n"
    faults = json.loads(client.ask("POST", "/predict", {"text": text})[1])["faults"]
    assert sorted(fault["place"] for fault in faults) == ["plan.foo", "plan.seq_len"]
    assert "draft" not in json.dumps(faults)
    broken = json.loads(client.ask("POST", "/predict", {"text": "model = \n"})[1])["faults"]
    assert "line 1" in broken[0]["problem"]


def test_what_if_is_every_combination_and_its_page_that_of_explore(
    client: Client, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    client.enter()
    asked = {"text": STUDY, "vary": "tp=1,3 nodes=1,2"}
    told = json.loads(client.ask("POST", "/explore", asked)[1])
    assert told["count"] == 4
    answer = inside(client.ask("GET", f"/report/{told['number']}")[1], "answer")
    file = tmp_path / "study.toml"
    file.write_text(STUDY)
    capsys.readouterr()
    assert main(["explore", str(file), "--vary", "tp=1,3", "--vary", "nodes=1,2", "--json", "--jobs", "1"]) == 0
    assert answer["columns"] == json.loads(capsys.readouterr().out)["columns"]
    assert answer["command"] == ["shardwise", "predict", "a.toml"]
    assert answer["counts"] == {"fits": 2, "illegal": 2}
    assert client.ask("POST", "/keep", {"text": STUDY, "number": told["number"]})[0] == 404
    for vary, words_ in (("", "0 axes"), ("tp=1 tp=2", "2 axes"), ("tq=1", "there is no 'tq'"), ("tp=1,x", "tp=x")):
        faults = json.loads(client.ask("POST", "/explore", asked | {"vary": vary})[1])["faults"]
        assert words_ in json.dumps(faults), vary
    many = ",".join(map(str, range(1, 502)))
    assert "501 combinations" in client.ask("POST", "/explore", asked | {"vary": f"micro_batch_size={many}"})[1]
    assert client.ask("POST", "/explore", {"text": STUDY})[0] == 404
    assert client.ask("POST", "/explore", asked, headers={"Origin": "http://evil.example"})[0] == 403


def test_runs_are_kept_in_the_folder_and_listed(client: Client, tmp_path: Path) -> None:
    client.enter()
    (tmp_path / "runs" / "run-0007.toml").write_text("half of one")
    number = json.loads(client.ask("POST", "/predict", {"text": STUDY})[1])["number"]
    kept = json.loads(client.ask("POST", "/keep", {"text": STUDY, "number": number})[1])
    assert kept == {"kept": "run-0008"}
    (found,) = json.loads(client.ask("GET", "/runs")[1])
    assert (found["name"], found["text"], found["verdict"]) == ("run-0008", STUDY, "fits")
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]
    names = sorted(path.name for path in (tmp_path / "runs").iterdir())
    assert names == ["draft.toml", "run-0007.toml", "run-0008.json", "run-0008.toml"]


def test_files_beside_the_study_are_found(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(
        (Path(__file__).resolve().parents[2] / "topologies" / "hgx-h100-8.toml").read_text()
    )
    (tmp_path / "runs").mkdir()
    told = Runs(tmp_path / "runs", tmp_path).predicted(STUDY.replace("hgx-h100-8", "mine.toml"))
    assert "answer" in told


def test_every_table_and_preset_can_be_completed() -> None:
    found = words()
    assert "llama3-8b" in found["names"]["model"]
    assert "hgx-h100-8" in found["names"]["cluster"]
    assert found["tables"]["plan"]["tp"]["about"]
    assert "fp8" in found["tables"]["plan.precision"]["compute"]["values"]
    assert "fp8_recipe" not in found["tables"]["plan"], "keys that have moved are not offered"


def test_what_cannot_be_served_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ui", str(tmp_path), "--folder", str(tmp_path / "a" / "b")]) == 3
    assert "2 faults" in capsys.readouterr().err


@pytest.mark.skipif(CHROMIUM is None, reason="pages are tried in Chromium, and it is not installed")
def test_a_study_is_edited_in_a_browser(server: Server) -> None:
    with Browser() as browser:
        browser.size(1600, 1000)
        browser.open(server.address)
        browser.wait("document.querySelector('.now data')")
        before = browser.ask("Number(document.querySelector('.now data').value)")
        browser.ask(
            "(() => { const area = document.getElementById('text'); area.focus(); area.setSelectionRange(99999, 99999) })()"
        )
        browser.send("Input.insertText", text="micro_b")
        browser.wait("!document.getElementById('offers').hidden")
        browser.key("Enter", "\r")
        browser.send("Input.insertText", text="'two'")
        browser.wait("document.querySelector('.faults li')")
        assert "plan.micro_batch_size" in browser.ask("document.querySelector('.faults').textContent")
        assert browser.ask("document.querySelector('.lines .wrong').textContent.trim()") == "5"
        browser.ask(
            "(() => { const area = document.getElementById('text'); area.value = area.value.replace(\"'two'\", '2'); area.dispatchEvent(new Event('input')) })()"
        )
        browser.wait(f"Number(document.querySelector('.now data').value) !== {before}")
        text = browser.ask("document.getElementById('text').value")
        assert re.search(r"micro_batch_size = 2$", text)
        browser.wait("document.getElementById('report').contentDocument?.documentElement?.dataset.ready")
        step_s = browser.ask("Number(document.querySelector('.now data').value)")
        inner = "document.getElementById('report').contentDocument"
        browser.wait(f"Number({inner}?.querySelector('#verdict data')?.value) === {step_s}")
        browser.ask("document.getElementById('vary').value = 'nodes=1,2'")
        browser.ask("document.getElementById('explore').click()")
        browser.wait(f"{inner}?.querySelector('#chosen data') && !document.getElementById('back').hidden")
        chosen = browser.ask(f"{inner}.querySelector('#chosen pre').textContent")
        assert chosen.startswith("shardwise predict a.toml --nodes ")
        browser.ask("document.getElementById('back').click()")
        browser.wait(f"Number({inner}?.querySelector('#verdict data')?.value) === {step_s}")
        browser.ask("document.getElementById('keep').click()")
        browser.wait("document.querySelector('.runs tbody')")
        assert "run-0001" in browser.ask("document.querySelector('.runs').textContent")
        assert not browser.problems
        assert browser.judged() == []
        own = f"http://{server.hosts[0]}/"
        assert all(request.startswith(own) for request in browser.requests)
