"""The accounts of all keys in one router, and of those who come with a token; what other routers say of them. Pure: time is given.

A key of the file or the store has its account for as long as it is in force. Accounts of tokens are made as they come, and the
longest unused of them go where there are too many.
"""

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import TypeVar

from serving.errors import ServingError
from serving.router.admission.meter import Meter
from serving.router.admission.rate_limit import Account
from serving.router.admission.shares import KeyUse
from serving.router.http.auth import ANYONE, Key, KeyFile
from serving.state.records import Demand

_MOST_BEARERS = 10_000  # whose use is remembered
# Keys that nobody has used yet, of which other routers are told in one beat: each costs every router tens of microseconds in each
# of the next twenty beats. A key that is used is told of at once.
_NEW_A_BEAT = 50
_A_STEP = 50  # keys that a beat looks at before requests go on

_T = TypeVar("_T")


class Accounts:
    """Who may use what in this router."""

    def __init__(self, keys: KeyFile, meter: Meter | None, now_s: float) -> None:
        """`meter` knows the keys' budgets, where there is a store."""
        self._keys = keys
        self._meter = meter
        self._of_keys: dict[str, Account] = {}
        self._bearers: dict[str, Account] = {}  # of those who come with a token
        self._by_id: dict[str, Account] = {}  # accounts with limits
        self._used: dict[str, Account] = {}  # those of them that routers tell each other of now
        self._new: deque[Account] = deque()  # other routers are still to be told of them
        self._router = ""
        self._other_routers: frozenset[str] = frozenset()
        # What other routers say of keys, by key and router.
        self._told: Mapping[str, Mapping[str, KeyUse]] = {}
        self._set(now_s)

    def arriving(self, headers: Iterable[tuple[bytes, bytes]], now_s: float, at_s: float) -> Account:
        """Whose request it is, by its headers; `at_s`: seconds since 1970. Raises UnauthorizedError."""
        account = self.of(self._keys.ring.holder(headers), now_s, at_s)
        if account.shared:
            account.wake(now_s)
            self._used[account.key.id] = account
        return account

    def whose(self, headers: Iterable[tuple[bytes, bytes]]) -> str:
        """The name of the key that a request shows; empty for all who show none of this service's."""
        try:
            return self._keys.ring.holder(headers).name
        except ServingError:
            return ""

    def of_line(self, sha256: str) -> Account:
        """An account for a line of a batch that a key left here; raises UnauthorizedError where the key is revoked.

        It is apart: it has no limits, and what it uses costs the key's other requests no turn.
        """
        key = self._keys.ring.owner(sha256)
        account = Account(Key.model_construct(name=f"{key.name} (batch)", sha256=sha256))
        account.budget = self._meter.budget(key) if self._meter else None
        account.open += 1
        return account

    def of(self, key: Key, now_s: float, at_s: float) -> Account:
        """The account of a key, or of whom a token names."""
        if account := self._of_keys.get(key.name):
            return account
        account = self._bearers.pop(key.name, None)
        if account is None:
            self._forget_idle_bearers()
            account = Account(key)
            account.set(key, now_s)
            self._knows(account, now_s)
            if account.shared and self._other_routers:
                self._share(account, now_s, at_s)
        elif account.key != key:
            account.set(key, now_s)
            self._knows(account, now_s)
        account.budget = self._meter.budget(key) if self._meter else None
        self._bearers[key.name] = account  # the latest stands last
        return account

    def others(self, demands: Sequence[Demand], router: str, now_s: float, at_s: float) -> Iterator[None]:
        """Take over what the other routers say of keys; `router` is this one. Once a beat, in steps between which requests may go on."""
        self._router = router
        yield from self._hear(demands, now_s)
        self._introduce(now_s)
        for used in _groups(list(self._used.items())):
            for key, account in used:
                if not account.rests(now_s):
                    self._share(account, now_s, at_s)
                elif self._used.get(key) is account:
                    del self._used[key]
            yield

    def lost(self, now_s: float) -> None:
        """Other routers may have taken this one for gone, and its part of all limits."""
        if self._other_routers:
            for account in self._used.values():
                account.lost(now_s)

    def regained(self) -> None:
        """Nobody has been heard of since."""
        for account in self._used.values():
            account.regained()

    def uses(self, now_s: float) -> dict[str, Sequence[float]]:
        """What limited keys that are used have in this router, for the other routers; by the beginning of a key's hash."""
        return {key: account.use(now_s) for key, account in self._used.items()}

    def refresh(self, now_s: float) -> bool:
        """Take over changed keys, and say whether there are any. What a key has used stays used. Raises ConfigError as the file does."""
        changed = self._keys.refresh()
        if changed:
            self._set(now_s)
        return changed

    def _hear(self, demands: Sequence[Demand], now_s: float) -> Iterator[None]:
        by_key: defaultdict[str, dict[str, KeyUse]] = defaultdict(dict)
        for other in demands:
            for keys in _groups(other.keys.items()):
                for key, use in keys:
                    by_key[key][other.router] = KeyUse.of(use)
                yield
        self._told = by_key
        self._other_routers = frozenset(other.router for other in demands)
        for told in _groups(by_key.items()):
            for key, uses in told:
                account = self._by_id.get(key)
                if account and account.is_news(uses):
                    account.wake(now_s)
                    self._used[key] = account
            yield

    def _share(self, account: Account, now_s: float, at_s: float) -> None:
        uses = self._told.get(account.key.id, {})
        account.share(self._router, uses, self._other_routers, now_s, at_s)

    def _knows(self, account: Account, now_s: float) -> None:
        """Other routers are told of a new account, or of one with other limits, if all of them have a part of it."""
        if account.shared:
            account.wake(now_s)
            self._by_id[account.key.id] = self._used[account.key.id] = account

    def _forget_idle_bearers(self) -> None:
        """Make room for one more, as far as there are bearers without a request."""
        while len(self._bearers) >= _MOST_BEARERS:
            idle = next((name for name, known in self._bearers.items() if not known.open), None)
            if idle is None:
                return
            gone = self._bearers.pop(idle).key.id
            self._by_id.pop(gone, None)
            self._used.pop(gone, None)
            if self._meter:
                self._meter.forget(gone)

    def _set(self, now_s: float) -> None:
        """Make one account per key."""
        accounts, new = {}, []
        for key in self._keys.ring.keys or (ANYONE,):
            account = self._of_keys.get(key.name)
            if account is None or account.key != key:
                account = account or Account(key)
                account.set(key, now_s)
                account.budget = self._meter.budget(key) if self._meter else None
                new.append(account)
            accounts[key.name] = account
        for name in self._of_keys.keys() - accounts.keys():
            self._of_keys[name].revoked = True  # requests that are still read, or wait, have it
        self._of_keys = accounts
        shared = (account for account in (*accounts.values(), *self._bearers.values()) if account.shared)
        self._by_id = {account.key.id: account for account in shared}
        self._used = {key: account for key, account in self._used.items() if self._by_id.get(key) is account}
        self._new.extend(new)
        self._introduce(now_s)

    def _introduce(self, now_s: float) -> None:
        """Tell other routers of new accounts, a few a beat."""
        for _ in range(min(len(self._new), _NEW_A_BEAT)):
            account = self._new.popleft()
            if self._by_id.get(account.key.id) is account:
                self._knows(account, now_s)


def _groups(items: Iterable[_T]) -> Iterator[list[_T]]:
    rest = iter(items)
    while group := list(islice(rest, _A_STEP)):
        yield group
