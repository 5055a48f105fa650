import pytest
from test_emulate_swa import differing, few, small
@pytest.mark.parametrize("choices",[{}, {"sync":"counter"},{"sync":"cluster","cluster":"2"},{"sync":"flag"}],ids=str)
def test_dry(emulate, choices):
    found=[]
    for dry in ("off","on"):
        kernel = emulate("muse_swa.py", ranks=2, seed=3, race=True, options=small(), choices={**choices,"dry_run":dry})
        kernel.check(tokens=9, context=100, route_override=few(9))
        inputs = kernel.verifier.inputs(9, 0)
        found.append(kernel.verifier.launch(inputs, few(9)))
    assert not differing(*found)
