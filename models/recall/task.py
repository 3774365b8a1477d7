"""The recall task of the bundled demo checkpoint: a line of random keys with their values, then one key again.

A prompt reads "otter: brass lantern; wren: kite; ... ; otter:" and its answer is "brass lantern", ended by ";".
Every word is one token, and so is every ";"; a key is one token together with its colon. No word occurs twice among
the pairs of a prompt, so each word of an answer is at just one position of the context: a KV cache that loses that
block, or reads a block of another prompt instead, gives a wrong answer.
"""

import random
from dataclasses import dataclass

TERMINATOR = ";"  # ends every value, and is the end-of-sequence token of the checkpoint
MAX_TOKENS = 512

KEYS = """
    aardvark alpaca ant antelope ape badger bat bear beaver bee beetle bison boar buffalo camel canary caribou cat
    cheetah chick chipmunk cobra condor cougar cow coyote crab crane cricket crow cub cuckoo deer dingo dog dolphin
    donkey dove dragonfly duck eagle eel egret elephant elk falcon ferret finch firefly flamingo fox frog gazelle
    gecko gerbil gibbon giraffe goat goose gorilla grouse gull hamster hare hawk hedgehog heron hippo hornet horse
    hyena ibis iguana impala jackal jaguar kangaroo kitten koala lark lemur leopard lion lizard llama lobster lynx
    magpie marten meerkat mink mole moose moth mouse newt octopus osprey otter owl panda panther parrot peacock
    pelican penguin pheasant pigeon pony porcupine possum puffin quail rabbit raccoon ram raven rhino robin rooster
    salmon sheep shrew shrimp slug snail sparrow spider squid squirrel stoat stork swan tapir tiger toad toucan trout
    turkey turtle viper vole wallaby walrus wasp weasel whale wolf wombat wren yak zebra
""".split()

ADJECTIVES = """
    amber ancient azure bent big bitter black blank blue bold bouncy brass brave bright brisk broad broken bronze brown
    calm carved cheap cheerful clean clear clever cloudy coarse cold cool copper cozy cracked crimson crisp curious
    curly damp dark deep dense dim dry dull dusty early eager easy elegant empty faded faint famous fancy fast flat
    fluffy folded formal fresh frosty frozen funny fuzzy gentle giant glad glossy golden grand gray greasy green grim
    happy hard hasty heavy hidden hollow honest hot huge humble icy idle indigo jolly keen kind large late lazy lean
    light little lively lonely long loose loud lovely lucky mellow merry mighty mild minty misty modern modest narrow
    neat new noble odd old olive painted pale patient plain polite proud purple quick quiet rapid rare ripe rough round
    royal rusty salty scarlet shiny short shy silent silver simple sleepy slow small smooth soft solid spare square
    steep strong sunny sweet tall tame thin tidy tiny velvet vivid warm wet white wide wild wise wooden yellow young
""".split()

NOUNS = """
    acorn anchor anvil apple arrow axe bag ball banjo barrel basket bell bench blanket boat book boot bottle bowl box
    bread brick bridge broom brush bucket button cabin cake candle canoe carpet cart castle chain chair cherry clock
    coat coin comb compass cookie cradle crown cup curtain desk diamond door dress drum engine fan feather fence
    fiddle flag flute fork fountain garden gate glove guitar hammer harp hat helmet honey hook island jacket jar
    jewel kettle key kite knife ladder lamp lantern leaf lemon letter lock map marble mask medal mirror mitten needle
    oar oven paddle pancake pear pebble pencil piano pillow pipe plate plum pocket pumpkin puzzle quilt rake ribbon
    ring robe rocket rope ruler saddle sail scarf shelf shell shield shoe shovel spoon stamp statue table teapot
    tent thimble ticket tower train tray trumpet tunnel umbrella vase violin wagon wallet wheel whistle window
""".split()

WORDS = [f"{key}:" for key in KEYS] + ADJECTIVES + NOUNS


@dataclass(frozen=True)
class RecallPrompt:
    """One line that ends in a key and a colon, and the value which that key has further up in the line."""

    text: str
    answer: str


def sample_pairs(rng: random.Random, num_tokens: int) -> list[list[str]]:
    """Return pairs that take exactly `num_tokens` tokens: each a key, a noun after 0 to 2 adjectives, a terminator."""
    if num_tokens < 3 or num_tokens > MAX_TOKENS:
        raise ValueError(f"the number of tokens must be 3 to {MAX_TOKENS}, not {num_tokens}")
    while True:
        counts, left = [], num_tokens  # the number of adjectives of each pair, and the tokens not yet used
        while left:
            # What is left after a pair must be nothing or room for another pair, which takes 3 to 5 tokens.
            counts.append(rng.choice([n for n in range(3) if left - 3 - n == 0 or left - 3 - n >= 3]))
            left -= 3 + counts[-1]
        # 512 tokens hold 128 pairs and 128 adjectives on average, so that running out of words is very rare.
        if len(counts) <= min(len(KEYS), len(NOUNS)) and sum(counts) <= len(ADJECTIVES):
            break
    keys, nouns = rng.sample(KEYS, len(counts)), rng.sample(NOUNS, len(counts))
    adjectives = iter(rng.sample(ADJECTIVES, sum(counts)))
    return [
        [f"{key}:", *(next(adjectives) for _ in range(count)), noun, TERMINATOR]
        for key, noun, count in zip(keys, nouns, counts, strict=True)
    ]


def sample_prompt(rng: random.Random, num_tokens: int) -> RecallPrompt:
    """Return a random prompt of exactly `num_tokens` tokens (4 to 512) which asks for any one of its pairs."""
    pairs = sample_pairs(rng, num_tokens - 1)
    asked = rng.choice(pairs)
    context = " ".join(" ".join(pair[:-1]) + TERMINATOR for pair in pairs)
    return RecallPrompt(text=f"{context} {asked[0]}", answer=" ".join(asked[1:-1]))


def sample_prompts(seed: int, count: int, min_tokens: int = 16, max_tokens: int = MAX_TOKENS) -> list[RecallPrompt]:
    """Return `count` prompts of ragged length, uniform between the two token counts, the same for the same seed."""
    # A string seed keeps this stream apart from the trainer's, whatever the two integers are.
    rng = random.Random(f"recall prompts {seed}")
    return [sample_prompt(rng, rng.randint(min_tokens, max_tokens)) for _ in range(count)]
