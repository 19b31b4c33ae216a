"""Word lists for synthetic tasks and chat."""

from __future__ import annotations


def listed(words: str) -> list[str]:
    """Words between spaces."""
    return words.split()


NAMES = listed(
    "Emma Harriet Elinor Marianne Fanny Anne Jane Elizabeth Lydia Kitty Mary Catherine Isabella "
    "Henry Edmund Frederick George Frank Robert Charles William John Thomas Edward James Walter "
    "Hamlet Ophelia Horatio Romeo Juliet Rosalind Orlando Viola Olivia Beatrice Benedick Hero "
    "Portia Brutus Cassius Cordelia Edgar Kent Banquo Duncan Malcolm Miranda Ariel Prospero "
    "Oscar Alice Bob Carol David Eve Grace Lucy Peter Sam Tom Nora Max Leo Ruth Simon Clara "
    "Hugo"
)
CITIES = listed(
    "London Paris Rome Venice Verona Padua Athens Bath Oxford Lyme Highbury Dover York Vienna "
    "Milan Berlin Madrid Lisbon Dublin Oslo Cairo Tokyo Delhi Boston"
)
NOUNS = listed(
    "garden river window candle letter carriage mountain silver lemon pepper violin castle "
    "forest ladder mirror pocket rabbit saddle tiger umbrella valley winter bottle button "
    "camera dragon engine feather guitar hammer island jacket kettle lantern magnet needle "
    "orange pencil quartz ribbon sailor turtle velvet walnut yellow anchor basket cherry desert "
    "eagle falcon ginger harbour insect jungle kitten lizard marble nectar oyster parrot raven "
    "scarlet thunder violet whistle apple bridge cloud drum flute grape horse iron jewel knight "
    "lamp moon nest ocean pearl queen rose ship stone table tower wheel bread clock crown field "
    "glass honey shell"
)
ADJECTIVES = listed(
    "red blue green golden silent happy gentle brave quiet bright dark cold warm proud swift "
    "little ancient bitter clever distant empty famous heavy honest humble lonely lucky merry "
    "noble plain sharp simple solemn strange sweet tender tired wild wise young"
)
