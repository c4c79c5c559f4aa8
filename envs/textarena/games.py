"""Tables of the games of TextArena 0.7.4 for one and for two players; tested on Python 3.11, without a network."""

from collections.abc import Collection

ONE_PLAYER = (
    *("2048", "Bandit", "Blackjack", "Crosswords", "FrozenLake", "GuessTheNumber", "LightsOut", "LogicPuzzle"),
    *("Mastermind", "Minesweeper", "PegJump", "RushHour", "Secretary", "Set", "Sokoban", "Sudoku", "TowerOfHanoi"),
)
TWO_PLAYERS = (
    *("Alquerque", "Battleship", "Breakthrough", "Briscola", "Chopsticks", "ColonelBlotto", "ConnectFour", "Crusade"),
    *("GameOfPureStrategy", "GermanWhist", "Golf", "HighSociety", "IndianPoker", "IteratedMatchingPennies"),
    *("IteratedPrisonersDilemma", "IteratedRockPaperScissors", "IteratedTwoThirdsAverage", "IteratedUltimatumGame"),
    *("KuhnPoker", "LiarsDice", "LinesOfAction", "MemoryGame", "NewRecruit", "Nim", "Othello", "PigDice", "Poker"),
    *("QuantumTicTacToe", "SantoriniBaseFixed", "SimpleBlindAuction", "SimpleNegotiation", "SimpleTak", "Snake"),
    *("SpiteAndMalice", "Stratego", "Surround", "Tak", "TicTacToe", "TruthAndDeception", "TwoDollar"),
    *("UltimateTicTacToe", "WildTicTacToe"),
)
LIMIT_IS_THE_END = ("Bandit", "Secretary", "Set", "SimpleBlindAuction")
"""Games whose rules name a winner at the turn limit, so that a game that reaches the limit is not truncated."""
LOST = {"FrozenLake": "You fell into a hole"}
"""Game for one player -> start of the message about a loss, which may come in the last allowed turn."""

_WORDS = "needs word lists from the network"
_SYNTAX = "is written in the syntax of a later Python"
_REWARD = "gives a text as its reward"
_MODEL = "needs a model behind a key"
_FILES = "lacks files that are not in the package"
BROKEN = {
    **dict.fromkeys(("Countdown", "Cryptarithm", "Slitherlink", "ThreeCardMonte"), _REWARD),
    **dict.fromkeys(("Checkers", "Chess", "IteratedStagHunt", "Klondike", "ReverseTicTacToe"), _SYNTAX),
    "UltimateTexasHoldem": _SYNTAX,
    **dict.fromkeys(("Hangman", "WordLadder", "Wordle", "WordSearch", "DontSayIt", "LetterAuction"), _WORDS),
    **dict.fromkeys(("SpellingBee", "WordChains", "Codenames"), _WORDS),
    **dict.fromkeys(("Debate", "GuessWho", "ScenarioPlanning", "TwentyQuestions"), _MODEL),
    **dict.fromkeys(("BabyAiText", "ScorableGames", "UsedCar", "UsedCarNegotiation"), _FILES),
    **dict.fromkeys(("MarketEntryGame", "PublicGoodsGame"), "never ends once every seat is out"),
    "SettlersOfCatan": "prints without end",
    "CharacterConclave": "fails in its reset",
    "FifteenPuzzle": "fails when it is solved",
}


def name_of(game: str) -> str:
    """Return the name of a game without version and variant."""
    return game.partition("-v")[0]


def game_id(game: str, known: Collection[str]) -> str:
    """Return the raw id of a game, whose observations hold only the new text instead of the whole transcript.

    Args:
        game: id in TextArena, or a name without version.
        known: all ids of TextArena.

    Raises:
        ValueError: the game does not exist, is known to be broken, or is for more than two players.
    """
    name = name_of(game)
    if name in BROKEN:
        raise ValueError(f"{name} of TextArena {BROKEN[name]}, so it is not supported.")
    if name not in (*ONE_PLAYER, *TWO_PLAYERS):
        raise ValueError(
            f"there is no game {game!r} for one or two; known for one: {', '.join(ONE_PLAYER)}; for two: "
            f"{', '.join(TWO_PLAYERS)}."
        )
    raw = f"{(game if game != name else f'{name}-v0').removesuffix('-raw')}-raw"
    if raw not in known:
        variants = [one.removesuffix("-raw") for one in known if one.endswith("-raw") and name_of(one) == name]
        raise ValueError(f"there is no variant {game!r} of {name}; known: {', '.join(variants)}.")
    return raw
