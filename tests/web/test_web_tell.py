"""Dashboard buttons that send requests to a running job, its answers, and their flags in charts."""

from playwright.sync_api import expect

from browser import open_page, painted, serve
from tell_tools import Job


def test_buttons_ask_the_job_and_its_answers_are_flags_in_the_charts(context, tmp_path):
    with Job(tmp_path, "alone", "pace=0.01") as job:
        server, address = serve(tmp_path)
        try:
            page = open_page(context, address, f"p=tell&v=run&r={job.run.id}")
            page.get_by_role("button", name="save", exact=True).click()
            requests = page.locator("section", has=page.get_by_role("heading", name="Requests"))
            expect(requests.get_by_role("row").nth(1)).to_contain_text("save")
            expect(requests.get_by_role("row").nth(1)).to_contain_text("done")
            page.get_by_role("button", name="set", exact=True).click()
            field = page.get_by_label("Values to set, such as lr=0.001")
            expect(field).to_have_value("lr=0.1 layers=2")
            field.fill("lr=0.25")
            page.get_by_role("button", name="ask").click()
            expect(requests).to_contain_text("set lr=0.25")
            expect(requests.get_by_text("done", exact=True)).to_have_count(2)
            page.get_by_role("button", name="set", exact=True).click()
            field.fill("lr=7")
            page.get_by_role("button", name="ask").click()
            expect(requests).to_contain_text("refused: lr cannot be 7: it is between 0 and 1")
            figure = painted(page, "lr")
            expect(figure.get_by_role("img", name="set lr=0.25")).to_have_count(1)
            page.once("dialog", lambda dialog: dialog.dismiss())  # cancels the confirmation of the stop
            page.get_by_role("button", name="stop", exact=True).click()
            assert [message for message in context.expected if "at the end of its current step" in message]
            context.expected.clear()
            assert job.process.poll() is None
            page.evaluate("window.confirm = () => true")
            page.get_by_role("button", name="stop", exact=True).click()
            job.ends()
            expect(requests).to_contain_text("stop")
            expect(page.get_by_role("button", name="stop", exact=True)).to_have_count(0)  # the run has ended
        finally:
            for one in context.pages:
                one.close()
            server.terminate()
            server.wait(20)
            server.stdout.close()


def test_a_dashboard_without_write_access_has_no_buttons_to_ask(context, tmp_path):
    with Job(tmp_path, "alone", "pace=0.01") as job:
        server, address = serve(tmp_path, "--port", "0")
        try:
            page = open_page(context, address, f"p=tell&v=run&r={job.run.id}")
            page.get_by_role("button", name="baseline", exact=True).wait_for()
            expect(page.get_by_role("button", name="stop", exact=True)).to_have_count(0)
        finally:
            for one in context.pages:
                one.close()
            server.terminate()
            server.wait(20)
            server.stdout.close()
