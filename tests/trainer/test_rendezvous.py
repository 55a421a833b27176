"""What `ddpz train` says, under torchrun, when the ranks do not meet or cannot reach each other."""

import socket

import pytest
import torch.distributed as dist

from ddpz_lite.course.cli import main
from ddpz_lite.course.cli.shared import UserError
from ddpz_lite.course.cli.train import meet


def test_who_has_come_and_who_has_not():
    store = dist.HashStore()
    store.set("come-2", "other-host")
    with pytest.raises(UserError) as caught:
        meet(store, rank=0, world_size=4, wait=0.1)
    text = str(caught.value)
    assert f"ranks 0 ({socket.gethostname()}), 2 (other-host); missing: 1, 3." in text
    assert "Fix: " in text and "--rdzv-id" in text and "localhost" in text


def test_all_have_come():
    store = dist.HashStore()
    for rank in (1, 2):
        store.set(f"come-{rank}", "other-host")
    meet(store, rank=0, world_size=3, wait=0.1)


def test_an_interface_that_is_not_there(tmp_path, monkeypatch, capsys):
    for name, value in {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
        "GLOO_SOCKET_IFNAME": "no-such-cable",
    }.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "text").write_text("to be or not to be, " * 200)
    words = ["train", "--text", str(tmp_path / "text"), "--steps", "1", "--context", "8"]
    assert main(words) == 2
    text = capsys.readouterr().err
    assert "no-such-cable" in text and "Fix: set GLOO_SOCKET_IFNAME" in text
