"""What every backend and every transport keeps to, as checks that a user's own can be put through.

Each check is a method named as the claim it makes, and needs no test runner:

    for check in BackendContract(make).checks():
        await check()

`make()` returns an async context manager of a `BackendBench` (a `TransportBench`): the thing under test, and what the
checks need to handle it. Every check makes one of its own. With pytest (and pytest-asyncio in its auto mode):

    @pytest.mark.parametrize("check", BackendContract(make).checks(), ids=lambda check: check.__name__)
    async def test_my_backend_keeps_the_contract(check):
        await check()

A claim that does not hold raises `ContractBroken`, an AssertionError; one that the bench has no means to check raises
`unittest.SkipTest`, which runners know.
"""

from pitstop.engine.contract.backend import BackendBench, BackendContract
from pitstop.engine.contract.checks import Contract, ContractBroken
from pitstop.engine.contract.transport import Rank, ThreadRank, TransportBench, TransportContract

__all__ = [
    "BackendBench",
    "BackendContract",
    "Contract",
    "ContractBroken",
    "Rank",
    "ThreadRank",
    "TransportBench",
    "TransportContract",
]
