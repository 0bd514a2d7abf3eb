"""The English the demo's tokenizer is trained on and the demo's prompts are cut from."""

from __future__ import annotations

PARAGRAPHS: tuple[str, ...] = (
    "A request begins as bytes on a socket. The server reads them, checks that they are valid, and hands "
    "the body to a handler. Nothing about the model has happened yet, and still time has passed. When "
    "the body is large or the server is busy, this first part can be longer than people expect, because "
    "every other request is read by the same thread.",
    "The messages of a conversation are then written out as one string with the marks that the model was "
    "trained to see. The string is cut into small pieces, and each piece becomes a number. A long "
    "document makes many numbers, so the work grows with the length of the text and not with the size of "
    "the model.",
    "Now the request has to wait for its turn. The engine can only run so many requests at the same "
    "time, and each of them needs room for its keys and values. If there is no room, or if too many "
    "others came first, the request stands in a line. To the user the line looks just like a slow model, "
    "which is why it should be measured on its own.",
    "When the turn comes, the engine looks for an earlier request that started with the same words. What "
    "has been worked out before does not have to be worked out again. The rest of the prompt goes "
    "through the layers in one pass, or in a few passes when it is very long. This is the part where the "
    "machine is busy with large products of numbers, and it decides how soon the first word of the "
    "answer can be shown.",
    "After that the model writes one word at a time. Each step reads all of the weights and all of the "
    "stored keys, and gives back a single number for each person who is waiting. The step takes nearly "
    "as long for one person as for eight, so the engine puts them together. A new prompt that arrives in "
    "the middle can hold up everybody else for a moment.",
    "The numbers are turned back into text and sent down the wire, piece by piece, until the answer is "
    "complete or the limit is reached. At the end the room is given back. Some of it is kept for the "
    "next request that asks about the same thing. Only then is the work done, and only then can the "
    "total be compared with the sum of its parts.",
    "Think of a small kitchen with one stove. People come in, read the board, and place an order. The "
    "order is written on a slip of paper, and the slip is put on a nail. The cook takes the slips in "
    "turn, looks in the cold room for what was prepared in the morning, and starts to work. One guest "
    "says that the kitchen is slow. Was it the door, the board, the nail, the stove or the waiter? "
    "Without a watch on each of them nobody can say.",
    "Good measurements are honest about what they leave out. If a clock was read in two places and the "
    "time between them belongs to no one, it should be written down as such and not be given to the "
    "nearest neighbour. If a value could not be seen, the report should say that it could not be seen. A "
    "number that was guessed must never stand beside a number that was measured without a word about the "
    "difference.",
    "The weather in the valley was calm that year. In spring the river ran high and brown under the old "
    "bridge, and children threw sticks from one side and hurried across to see them come out on the "
    "other. In summer the grass turned yellow, and the farmers waited for rain. Winter came early, with "
    "long nights and clear mornings, and smoke rose straight up from every house.",
    "She asked him where the letters were kept, and he pointed to a box on the highest shelf. There were "
    "more than a hundred of them, tied together with string and sorted by the year in which they had "
    "been written. Most were short. They spoke about money, about health, about the price of bread and "
    "the length of the journey, and each one closed with the same question: when will you come home "
    "again?",
)

_COMMON = """
    the of and to in is that it was for on are as with his they at be this from have or by one had
    not but what all were when we there can an your which their said if do will each about how up
    out them then she many some so these would other into has more her two like him see time could
    no make than first been its who now people my made over did down only way find use may water
    long little very after words called just where most know get through back much before go good
    new write our used me man too any day same right look think also around another came come work
    three word must because does part even place well such here take why things help put years
    different away again off went old number great tell men say small every found still between name
    should home big give air line set own under read last never us left end along while might next
    sound below saw something thought both few those always looked show large often together asked
    house world going want school important until form food keep children feet land side without boy
    once animals life enough took sometimes four head above kind began almost live page got earth
    need far hand high year mother light parts country father let night following picture being
    study second eyes soon times story boys since white days ever paper hard near sentence better
    best across during today others however sure means knew try told young miles sun ways thing
    whole hear example heard several change answer room sea against top turned learn point city play
    toward five using himself usually money seen car morning given group clear system order model
    table list value result test plan cause reason problem question memory letter server token user
    data text file code write open close start stop slow fast quick short large ready state field
    share level power local whole total check
"""

WORDS: tuple[str, ...] = tuple(_COMMON.split())


def training_text() -> list[str]:
    """Return the lines the tokenizer learns its merges from, in a fixed order."""
    listed = [" " + " ".join(WORDS[i : i + 20]) for i in range(0, len(WORDS), 20)]
    return [*PARAGRAPHS, *listed]


def sentences() -> list[str]:
    """Return every sentence of the paragraphs on its own."""
    found: list[str] = []
    for paragraph in PARAGRAPHS:
        marked = paragraph.replace("? ", "?\n").replace(". ", ".\n")
        found.extend(marked.split("\n"))
    return found
