"""Where messages go: what each service really gets, from the real library, on real servers of this machine."""

import email
import io
import json
import os
import socket
import subprocess
import sys

import pytest
from aiosmtpd.controller import Controller
from PIL import Image

import fanfold
from fanfold.cli import main
from fanfold.errors import MissingExtra
from fanfold.notify.events import happened
from fanfold.notify.ledger import LEDGER, FilePages, Ledger
from fanfold.notify.message import compose
from fanfold.notify.options import NotifyOptions, read_options
from fanfold.notify.services import AppriseService, NotSent, Service, Webhook, open_service
from fanfold.store import open_run
from receivers import receiving

pytestmark = pytest.mark.filterwarnings("default")  # Apprise imports a hundred services; one that warns is none of ours


@pytest.fixture
def receiver():
    with receiving() as found:
        yield found


@pytest.fixture
def message(tmp_path):
    """Return a message about a run that failed, with a picture of its loss."""
    run = fanfold.init("p", id="r", name="<b>*bold*</b>", dir=tmp_path / "runs", system=False, quiet=True)
    for step in range(50):
        run.log({"train/loss": 1 / (step + 1)})
    run.alert("<!channel> a & b", "*x* _y_ <https://example.org|here>", level="error")
    run.finish()
    stored = open_run(run.path)
    return compose(stored, [event for event in happened(stored) if event.kind == "alert"][:1])


class Inbox:
    def __init__(self):
        self.messages = []

    async def handle_DATA(self, server, session, envelope):
        self.messages.append((envelope.rcpt_tos, email.message_from_bytes(envelope.content)))
        return "250 OK"


def test_an_e_mail_has_the_text_and_the_picture(tmp_path):
    run = fanfold.init("p", id="r", dir=tmp_path / "runs", system=False, quiet=True)
    for step in range(50):
        run.log({"train/loss": 1 / (step + 1)})
    run.finish()
    stored = open_run(run.path)
    inbox = Inbox()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = Controller(inbox, hostname="127.0.0.1", port=port)
    server.start()
    try:
        service = open_service(f"mailto://127.0.0.1:{port}?from=fanfold@example.org&to=me@example.org&mode=insecure")
        service.send(compose(stored, happened(stored)))
    finally:
        server.stop()
    ((to, mail),) = inbox.messages
    assert to == ["me@example.org"]
    parts = {part.get_content_type(): part.get_payload(decode=True) for part in mail.walk() if not part.is_multipart()}
    assert "finished" in str(email.header.make_header(email.header.decode_header(mail["subject"])))
    assert any(b"run r" in data for kind, data in parts.items() if kind.startswith("text/"))
    picture = Image.open(io.BytesIO(parts["image/png"]))
    assert picture.size == (720, 320)
    assert len(set(picture.convert("RGB").getdata())) > 10  # something is drawn


@pytest.mark.parametrize(
    ("address", "plugin", "attribute"),
    [
        ("slack://T1JJ3T3L2/A1BRTD4JD/TIiajkdnlazkcOXrIdevi7FQ/", "NotifySlack", "webhook_url"),
        ("https://hooks.slack.com/services/T1JJ3T3L2/A1BRTD4JD/TIiajkdnlazkcOXrIdevi7FQ", "NotifySlack", "webhook_url"),
        ("discord://4174216298/JHMHI8qBe7bk2ZwO5U711o3dV_js", "NotifyDiscord", "notify_url"),
    ],
)
def test_the_payload_has_the_documented_form(message, receiver, monkeypatch, address, plugin, attribute):
    service = open_service(address)
    assert isinstance(service, AppriseService)
    assert type(service.plugin).__name__ == plugin
    monkeypatch.setattr(type(service.plugin), attribute, receiver.url)  # the real library, and our server instead of theirs
    service.send(message)
    kind, body = receiver.requests[0][1]["content-type"], json.loads(receiver.requests[0][2])
    assert kind.startswith("application/json")
    if plugin == "NotifySlack":
        # docs.slack.dev: a message needs `text`, `blocks` or `attachments`; an attachment's text and title are texts.
        (attachment,) = body["attachments"]
        assert all(isinstance(attachment[name], str) for name in ("title", "text", "color"))
        assert isinstance(attachment["ts"], (int, float))
        assert set(body) <= {
            "text",
            "blocks",
            "attachments",
            "username",
            "mrkdwn",
            "icon_url",
            "icon_emoji",
            "channel",
            "thread_ts",
        }
        assert "<!channel>" not in json.dumps(body)  # what a run says must not call a whole channel
    else:
        # discord.com/developers: one of content or embeds; content has at most 2000 characters.
        assert 0 < len(body["content"]) <= 2000
        assert isinstance(body["wait"], bool)
        assert "loss" not in body


def test_the_payload_for_teams_is_an_adaptive_card(message):
    """Teams takes cards from a workflow, whose address is always https, so the payload is checked before it is sent."""
    service = open_service("workflows://prod-12.westeurope.logic.azure.com:443/643e69f83c8944/abcd-signature/")
    payload = service.plugin.gen_payload(body=message.text, title=message.title)
    # learn.microsoft.com: a message with attachments, each an adaptive card with a type, a version and a body of elements.
    assert payload["type"] == "message"
    (card,) = payload["attachments"]
    assert card["contentType"] == "application/vnd.microsoft.card.adaptive"
    assert card["content"]["type"] == "AdaptiveCard"
    assert isinstance(card["content"]["version"], str)
    assert all(element["type"] in ("TextBlock", "Image", "ColumnSet") for element in card["content"]["body"])
    assert message.title in json.dumps(card)


def test_telegram_and_ntfy_are_known_to_apprise():
    for address in ("tgram://123456789:AAEhBOweik6ad-ABCDEFGHIJKLMNOPQRSTU/12315544", "ntfy://my-topic"):
        assert isinstance(open_service(address), AppriseService), address
    with pytest.raises(NotSent, match="does not know this address"):
        open_service("no-such-service://x/secret-word")


def test_apprise_json_and_a_plain_webhook_both_arrive(message, receiver):
    open_service(receiver.url.replace("http://", "json://")).send(message)
    plain = open_service(receiver.url)
    assert isinstance(plain, Webhook)
    plain.send(message)
    theirs, ours = (json.loads(body) for _, _, body in receiver.requests)
    assert theirs["title"] == message.title
    assert ours["version"] == 1
    assert ours["events"][0]["title"] == "<!channel> a & b"


@pytest.mark.parametrize("status", [301, 404, 500])
def test_an_answer_other_than_success_is_a_failure_without_the_secret(message, receiver, status):
    receiver.status = status
    for address in (f"{receiver.url}?token=hunter2", receiver.url.replace("http://", "json://user:hunter2@")):
        with pytest.raises(NotSent) as caught:
            open_service(address).send(message)
        assert "hunter2" not in str(caught.value)


def test_a_name_says_the_kind_and_nothing_secret():
    names = [
        Service("slack://T1/A1/secret").name, Service("https://user:pass@example.org/secret?x=y").name,
        Service("cmd:/usr/bin/notify-me --password secret").name,
    ]  # fmt: skip
    assert [name.split(" ")[0] for name in names] == ["slack", "https://example.org", "cmd:notify-me"]
    assert "secret" not in str(names)
    assert Service("slack://T1/A1/secret").name == names[0] != Service("slack://T1/A1/other").name


def test_a_command_that_fails_or_is_not_there_says_why(message, tmp_path):
    with pytest.raises(NotSent, match="exit code 3"):
        open_service(f"cmd:{sys.executable} -c 'import sys; sys.exit(3)'").send(message)
    with pytest.raises(NotSent, match="No such file"):
        open_service(f"cmd:{tmp_path}/nothing").send(message)


def test_without_apprise_the_error_names_the_extra(monkeypatch, message, receiver):
    monkeypatch.setitem(sys.modules, "apprise", None)  # as if it were not installed
    with pytest.raises(MissingExtra, match=r"pip install 'fanfold\[notify\]'"):
        open_service("ntfy://topic")
    open_service(receiver.url).send(message)
    assert receiver.messages


def test_a_missing_library_is_one_warning_and_training_goes_on(tmp_path):
    code = (
        "import sys, importlib.abc\n"
        "class No(importlib.abc.MetaPathFinder):\n"
        "    def find_spec(self, name, path, target=None):\n"
        "        if name == 'apprise': raise ModuleNotFoundError(name)\n"
        "real = __import__('importlib.util').util.find_spec\n"
        "__import__('importlib.util').util.find_spec = lambda name, *a: None if name == 'apprise' else real(name, *a)\n"
        "import fanfold\n"
        f"run = fanfold.init('p', id='r', dir={str(tmp_path / 'runs')!r}, system=False, quiet=True, notify=['ntfy://localhost:9/x'])\n"
        "run.log({'x': 1.0}); run.finish()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=dict(os.environ))
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("pip install 'fanfold[notify]'") == 1


@pytest.mark.parametrize(
    ("text", "addresses"),
    [
        ("slack://a/b/c", ("slack://a/b/c",)),
        ("slack://a/b/c mailto://x?to=a,b", ("slack://a/b/c", "mailto://x?to=a,b")),
        ("cmd:notify-me --to me\nntfy://x", ("cmd:notify-me --to me", "ntfy://x")),
        ('["cmd:curl https://example.org"]', ("cmd:curl https://example.org",)),
        ("", ()),
    ],
)
def test_the_variable_holds_several_addresses(monkeypatch, text, addresses):
    monkeypatch.setenv("FANFOLD_NOTIFY", text)
    assert read_options().to == addresses
    assert read_options(["ntfy://y"]).to == ("ntfy://y",)
    assert read_options([]).to == ()


def test_quiet_hours_may_pass_midnight():
    night, noon = NotifyOptions(quiet="22:00-07:00"), NotifyOptions(quiet="12:00-13:30")
    assert [night.is_quiet(hour * 60) for hour in (21, 22, 3, 6, 7)] == [False, True, True, True, False]
    assert [noon.is_quiet(minute) for minute in (719, 720, 809, 810)] == [False, True, True, False]


def test_the_test_command_tells_what_became_of_each(receiver, tmp_path):
    env = {**os.environ, "FANFOLD_NOTIFY": f"{receiver.url} cmd:{tmp_path}/nothing"}
    command = [sys.executable, "-m", "fanfold", "notify", "test", "--json"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2, done.stderr
    first, second = json.loads(done.stdout)
    assert (first["outcome"], second["outcome"]) == ("sent", "failed")
    assert "No such file" in second["why"]
    assert receiver.messages[0]["event"] == "test"


def test_show_lists_what_was_sent_about_a_run(receiver, tmp_path):
    run = fanfold.init("p", id="r", dir=tmp_path / "runs", system=False, quiet=True, notify=[receiver.url])
    run.alert("one")
    run.finish()
    receiver.wait(lambda: "finished" in receiver.told())
    command = [sys.executable, "-m", "fanfold", "notify", "show", "r", "--dir", str(tmp_path / "runs"), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode in (0, 3)  # the last outcome may be on its way to the disk
    rows = json.loads(done.stdout)
    assert [row["title"].partition(": ")[2] for row in rows] == ["one", "finished"]
    assert rows[0]["to"].startswith("http://127.0.0.1 ")


def test_show_counts_a_failed_message_as_sent_once_its_events_went_out_with_others(tmp_path, capsys):
    run = fanfold.init("p", id="r", dir=tmp_path, system=False, quiet=True)
    run.finish()
    ledger = Ledger(FilePages(run.path / "relay" / LEDGER))
    ledger.begin(0.0, ["a"])
    ledger.write("intent", to="a", message="1", events=["x"], title="one")
    ledger.write("failed", to="a", message="1", why="the server answered 500")
    assert main(["notify", "show", "r", "--dir", str(tmp_path)]) == 3
    ledger.write("intent", to="a", message="2", events=["x", "y"], title="2 events")
    ledger.write("sent", to="a", message="2")
    capsys.readouterr()
    assert main(["notify", "show", "r", "--dir", str(tmp_path), "--json"]) == 0
    assert [row["outcome"] for row in json.loads(capsys.readouterr().out)] == ["sent", "sent"]
