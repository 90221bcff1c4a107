"""All commands and where each is written; a command's module is imported when it is asked for."""

from cyclopts import App, Group

app = App(
    name="torpor",
    help="The place where AI agents run: sessions with a machine of their own, that sleep while they wait.",
    version_flags=["--version"],
    default_parameter=None,
    help_epilogue="Every command takes --json and --data-dir. Exit codes: 0 done, 1 refused, 2 usage, 3 unavailable.",
)

_whole = Group("The whole", sort_key=1)
_work = Group("Sessions and evidence", sort_key=2)
_fleet = Group("Operating", sort_key=3)

session = App(name="session", help="Create, use, put to sleep, wake and end sessions.", group=_work)
file = App(name="file", help="Files of sessions; SESSION:PATH names one.", group=_work)
checkpoint = App(name="checkpoint", help="What sessions are kept as: to sleep, to fork, to go back to.", group=_work)
audit = App(name="audit", help="Check, carry away, rebuild and replay the log.", group=_work)
image = App(name="image", help="What the guests of sessions are made of.", group=_fleet)
host = App(name="host", help="The hosts that run machines.", group=_fleet)

_TOP = (
    ("demo", "torpor.cli.demo:demo", _whole, "Tell one agent's story on a real machine, and check all that is told."),
    ("up", "torpor.cli.whole:up", _whole, "Start the whole here: server and services, until Ctrl-C."),
    ("down", "torpor.cli.whole:down", _whole, "Stop the whole of a data directory; the sessions stay."),
    ("status", "torpor.cli.whole:status", _whole, "Show what runs where, and whether it answers."),
    ("doctor", "torpor.cli.health:doctor", _whole, "Say what this machine can run, and what to do about the rest."),
    ("events", "torpor.cli.record:events", _work, "Print the events of the log, as they are or as they happen."),
    ("usage", "torpor.cli.record:usage", _work, "Show what was used, and what it costs."),
    ("resources", "torpor.cli.record:resources", _work, "Show what machines hold on their hosts, and why still."),
    ("bench", "torpor.cli.health:bench", _fleet, "Measure, beside a floor measured in the same run."),
    ("completion", "torpor.cli.health:completion", _fleet, "Print the completion script of a shell."),
    ("version", "torpor.cli.health:version", _fleet, "Print the version."),
)
_SESSION = (
    ("create", "Make a session, and wait until its machine runs."),
    ("list", "List sessions."),
    ("show", "Show one session."),
    ("suspend", "Put a session to sleep."),
    ("resume", "Wake a session."),
    ("terminate", "End a session for good."),
)
_PROGRAMS = (
    ("exec", "Run a program in a session; wakes it when it sleeps."),
    ("ps", "List the programs of a session that have not ended."),
    ("attach", "Go on with a program: its output, and our keys or input."),
    ("logs", "Print what a program wrote, from any byte on; with -f as it is written."),
    ("output", "Follow the output of a program, from any byte on."),
    ("signal", "Send a signal to a program."),
)
_BRANCHES = (
    ("checkpoint", "Checkpoint a session while it runs on."),
    ("fork", "Make new sessions that begin where a session is."),
    ("rollback", "Take a session back to a checkpoint."),
)
_FILE = (
    ("get", "Copy a file out of a session."),
    ("put", "Copy a file into a session."),
    ("ls", "List a directory."),
    ("stat", "Show one file, directory or link."),
    ("mkdir", "Make a directory and those above it."),
    ("mv", "Rename a file or directory within a session."),
    ("rm", "Remove a file, a link or a directory."),
    ("watch", "Print what happens in a directory, until Ctrl-C."),
)
_CHECKPOINT = (
    ("list", "List checkpoints."),
    ("tree", "Show which checkpoint was made after which."),
    ("verify", "Read checkpoints whole, and say whether every byte is what it was."),
)
_AUDIT = (
    ("verify", "Check the whole log and its copies, or a bundle, off-line."),
    ("export", "Write a bundle that proves a session's events off-line."),
    ("rebuild", "Make the stream, or the views, afresh from the log."),
    ("replay", "Print a session's history, and the state it folds to."),
)
_IMAGE = (
    ("build", "Build a guest image, unless it is there."),
    ("list", "List images."),
)
_HOST = (
    ("list", "List hosts."),
    ("drain", "Take no new machines on a host; suspend those that run."),
    ("undrain", "Take new machines again."),
)

for _name, _path, _group, _help in _TOP:
    app.command(_path, name=_name, group=_group, help=_help)
for _group_app, _module, _commands in (
    (session, "torpor.cli.session", _SESSION),
    (session, "torpor.cli.program", _PROGRAMS),
    (session, "torpor.cli.branching", _BRANCHES),
    (file, "torpor.cli.file", _FILE),
    (checkpoint, "torpor.cli.checkpoint", _CHECKPOINT),
    (audit, "torpor.cli.audit", _AUDIT),
    (image, "torpor.cli.image", _IMAGE),
    (host, "torpor.cli.host", _HOST),
):
    for _name, _help in _commands:
        _group_app.command(f"{_module}:{_name}_", name=_name, help=_help)
checkpoint.command(
    "torpor.cli.branching:checkpoint_", name="create", help="Checkpoint a session while it runs on.", sort_key=0
)
for _group_app in (session, file, checkpoint, audit, image, host):
    app.command(_group_app)
