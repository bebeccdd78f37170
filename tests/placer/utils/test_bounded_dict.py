import pickle

from placer.utils.bounded_dict import MOST_ENTRIES, BoundedDict


def test_a_full_dictionary_forgets_everything_before_a_new_key() -> None:
    known: BoundedDict[int, int] = BoundedDict()
    for key in range(MOST_ENTRIES):
        known[key] = key
    assert len(known) == MOST_ENTRIES
    known[MOST_ENTRIES] = 1
    assert known == {MOST_ENTRIES: 1}


def test_a_full_dictionary_keeps_everything_when_a_known_key_changes() -> None:
    known: BoundedDict[int, int] = BoundedDict()
    for key in range(MOST_ENTRIES):
        known[key] = key
    known[0] = 1
    assert len(known) == MOST_ENTRIES and known[0] == 1


def test_a_dictionary_survives_pickling() -> None:
    known: BoundedDict[str, int] = BoundedDict()
    known["a"] = 1
    copied = pickle.loads(pickle.dumps(known))
    assert type(copied) is BoundedDict and copied == {"a": 1}
