"""The verb ``completion``: scripts by which a shell completes verbs, groups, options, fields and flags.

A script has all words in it, so that a TAB starts no process.
"""

import shlex
import sys
from collections.abc import Iterable

from harness.compose.arguments import Argument
from harness.compose.hydra import folders_of_environment, search_path
from harness.compose.overrides import all_fields, groups, named_options
from harness.compose.verb import VERBS, Verb
from harness.config.job import Job
from harness.util.errors import EXIT_OK

HELP = """`harness completion`: complete verbs, groups, options and fields in a shell.

    source <(harness completion bash)      in ~/.bashrc
    source <(harness completion zsh)       in ~/.zshrc, after compinit
    harness completion fish | source       in ~/.config/fish/config.fish

It prints a script, with the options of installed packages and of `HARNESS_CONF`. Written to a file
that the shell reads, it costs no time when a shell starts.
"""
# A word is completed up to its next point or equals sign: training., training.steps=. What follows
# an equals sign is a word of its own in bash, not in zsh.
_BASH = """\
_harness() {
    local typed=${COMP_LINE:0:$COMP_POINT} every each rest stem
    typed=${typed##* }
    case $COMP_CWORD,${COMP_WORDS[1]} in
    1,*) every=VERBS ;;
CASES
    esac
    COMPREPLY=()
    for each in $every; do
        [[ $each == "$typed"* ]] || continue
        rest=${each#"$typed"}
        stem=${rest%%[.=]*}
        [[ $typed == *=* ]] || rest=$stem${rest:${#stem}:1}
        each=$typed$rest
        [[ $COMP_WORDBREAKS != *=* || $typed != *=* ]] || each=${each#*=}
        [[ " ${COMPREPLY[*]} " == *" $each "* ]] || COMPREPLY+=("$each")
    done
    [[ ${COMPREPLY[0]} != *[.=] ]] || compopt -o nospace 2> /dev/null
}
"""
# Where no word fits, names of files do.
_OF_BASH = "complete -o default -F _harness harness\n"
# compopt is missing there, so no word is followed by a space.
_OF_ZSH = "autoload -U +X bashcompinit && bashcompinit\ncomplete -o nospace -o default -F _harness harness\n"


def completion(shell: str) -> int:
    """Print the script for a shell; return the exit code."""
    with search_path([], "train", folders=folders_of_environment()):
        words = {name: _quoted(typed_after(VERBS[name])) for name in VERBS}
    if shell == "fish":
        after = {f"__fish_seen_subcommand_from {name}": each for name, each in words.items()}
        after["__fish_use_subcommand"] = _quoted(words)
        lines = [f"complete -c harness -n '{when}' -a {each}" for when, each in after.items()]
        text = "\n".join(["complete -c harness -n __fish_use_subcommand -f", *lines, ""])
    else:
        cases = "\n".join(f"    *,{name}) every={each} ;;" for name, each in words.items())
        text = _BASH.replace("VERBS", _quoted(words)).replace("CASES", cases)
        text += _OF_BASH if shell == "bash" else _OF_ZSH
    sys.stdout.write(text)
    return EXIT_OK


def _quoted(words: Iterable[str]) -> str:
    return shlex.quote(" ".join(words))


def typed_after(verb: Verb) -> list[str]:
    """Return what can be typed after a verb: flags and words, fields, and options of groups."""
    words = list(verb.parser()._option_string_actions)
    for argument in verb.arguments:
        words += argument.options.get("choices", ())
    if verb.job is not None:
        words += [f"{name}=" for name, inner in all_fields(verb.job) if inner is None]
        if issubclass(verb.job, Job):
            for group in groups():
                words += [f"{group}={option}" for option in named_options(group)]
    return words


VERB = Verb(
    "completion",
    completion,
    help=HELP,
    arguments=(Argument("shell", choices=("bash", "zsh", "fish"), help="bash, zsh or fish"),),
)
