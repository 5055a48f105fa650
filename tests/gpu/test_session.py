"""What a session refuses on a real GPU, and graphs with changing tokens."""

from __future__ import annotations

from typing import Any

import pytest

from megagen.errors import DeviceError

pytestmark = pytest.mark.gpu


def test_more_blocks_than_fit_are_refused(rig: Any) -> None:
    from megagen.runtime.session import Session

    built = rig.built()
    big = built.plan.launch.model_copy(update={"blocks": 2 * built.plan.machine.sms})
    with pytest.raises(DeviceError, match="can be resident"):
        Session(built.plan.model_copy(update={"launch": big}), built.artifacts["sm_90a"].path)


def test_another_architecture_is_refused(rig: Any) -> None:
    from megagen.runtime.session import Session

    built = rig.built()
    other = built.plan.machine.model_copy(update={"name": "b200", "arch": "sm_100a"})
    with pytest.raises(DeviceError, match=r"b200 \(sm_100a\)"):
        Session(built.plan.model_copy(update={"machine": other}), built.artifacts["sm_90a"].path)


def test_a_file_that_is_no_cubin_is_refused(rig: Any, tmp_path: Any) -> None:
    from megagen.runtime.session import Session

    path = tmp_path / "x.cubin"
    path.write_bytes(b"\x7fELF" + bytes(4096))
    with pytest.raises(DeviceError, match=r"loading x\.cubin: CUDA_ERROR"):
        Session(rig.built().plan, path)


def test_a_text_compiled_again_says_what_it_takes(usual: Any, tmp_path: Any) -> None:
    """Beside a driver NVRTC keeps what it compiled, without ptxas's words: a second cache of ours would not do."""
    from megagen.cli import pipeline
    from megagen.compile import compile_source
    from megagen.settings import Settings

    plan = usual.session.plan
    for n in range(2):
        settings = Settings(cache_dir=tmp_path / str(n))
        (made,) = compile_source(
            pipeline.emit(plan), kernels=[plan.name], archs=[plan.machine.arch], settings=settings
        ).values()
        assert made.kernels[plan.name].registers > 0


def test_host_tensors_are_not_bound(rig: Any, usual: Any) -> None:
    packed, _ = rig.usual
    with pytest.raises(DeviceError) as e:
        usual.session.bind({**packed, "stream": usual.stream.cpu()})
    assert "stream: is on cpu, must be on cuda:0" in e.value.render()


def test_seventeen_tokens_are_refused(usual: Any) -> None:
    with pytest.raises(DeviceError, match="17 tokens"):
        usual.session.set_tokens(17)


def test_one_graph_serves_every_token_count(usual: Any) -> None:
    import torch

    session = usual.session
    rows = torch.randn(16, usual.stream.shape[1], device=session.device)
    graph = session.capture([usual.layer])
    for tokens in (16, 3, 9):
        want = usual.launch(rows[:tokens])["stream_out"]
        session.poison()
        graph.replay()
        session.synchronize()
        got = session.outputs["stream_out"]
        assert torch.equal(got[:tokens].view(torch.int32), want.view(torch.int32))


def test_launches_into_a_stream_of_the_callers(usual: Any) -> None:
    import torch

    session = usual.session
    rows = torch.randn(4, usual.stream.shape[1], device=session.device)
    want = usual.launch(rows)["stream_out"]
    session.poison()
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    session.launch(usual.layer, stream)
    session.synchronize(stream)
    assert torch.equal(session.outputs["stream_out"][:4].view(torch.int32), want.view(torch.int32))
