"""Properties of the key's engine fields for generated arguments."""

from itertools import chain

from coldstart.artifacts.key import Key
from hypothesis import given
from hypothesis import strategies as st

from coldstart.contract.arguments import parse
from coldstart.models.relevance import IGNORED, select_engine_fields

NAMES = st.from_regex(r"[a-z][a-z0-9]{0,8}(-[a-z0-9]{1,6}){0,2}", fullmatch=True).filter(
    lambda name: not name.startswith("no-") and name.replace("-", "_") not in IGNORED
)
WORDS = st.text(st.characters(codec="ascii", exclude_categories=["Cc"]), max_size=30).filter(
    lambda word: not word.startswith("-")
)
VALUES = st.one_of(WORDS, st.integers().map(str), st.floats(allow_nan=False, allow_infinity=False).map(str))
FLAGS = st.dictionaries(NAMES, VALUES, max_size=6)


@given(FLAGS, st.randoms())
def test_the_order_of_flags_does_not_matter(flags: dict[str, str], random: object) -> None:
    pairs = list(flags.items())
    random.shuffle(pairs)  # type: ignore[attr-defined]
    straight = parse(list(chain.from_iterable((f"--{name}", value) for name, value in flags.items())))
    shuffled = parse([f"--{name}={value}" for name, value in pairs])
    assert select_engine_fields(straight) == select_engine_fields(shuffled)


@given(FLAGS)
def test_every_argument_makes_a_valid_key_without_paths(flags: dict[str, str]) -> None:
    argv = [f"--{name}={value}" for name, value in flags.items()]
    fields = select_engine_fields(parse(argv))
    key = Key({"engine.base": 1, **{f"engine.{name}": value for name, value in fields.items()}})
    assert not any(str(value).startswith(("/", "~", "./", "../")) for value in key.fields.values())
