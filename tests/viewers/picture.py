"""Run by MLflow's own Python: a trace in MLflow's pages, as a person sees it.

    picture.py CHROMIUM URL TRACE_ID SPAN FILE

Opens the trace's timeline with SPAN selected, writes it to FILE (PNG) and prints every text that can be seen whole.
"""

import json
import sys

from playwright.sync_api import Page, sync_playwright

SIZE = {"width": 1360, "height": 690}
#: Where the timeline ends and the selected span's attributes begin, in pixels from the left.
SPLIT = 900
WHOLE = """() => {
    const seen = [];
    const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    while (walk.nextNode()) {
        const range = document.createRange();
        range.selectNodeContents(walk.currentNode);
        const box = range.getBoundingClientRect();
        const at = x => document.elementFromPoint(x, box.y + box.height / 2);
        const mine = element => element && element.contains(walk.currentNode);
        if (box.width && mine(at(box.left + 1)) && mine(at(box.right - 1))) seen.push(walk.currentNode.data);
    }
    return seen;
}"""


def show(page: Page, url: str, trace_id: str, span: str) -> None:
    page.goto(f"{url}/#/experiments/0/traces?selectedEvaluationId=tr-{trace_id}")
    page.get_by_label("Full screen").click()
    page.get_by_label("Show execution timeline").click()
    page.locator(f"text=/^{span}$/ >> visible=true").first.click()
    grips = [e for e in page.query_selector_all(".react-resizable *") if cursor(e) == "ew-resize"]
    edge = grips[0].bounding_box()
    y = edge["y"] + edge["height"] / 2
    page.mouse.move(edge["x"] + edge["width"] / 2, y)
    page.mouse.down()
    page.mouse.move(SPLIT, y, steps=10)
    page.mouse.up()
    page.mouse.move(SIZE["width"] - 1, SIZE["height"] - 1)
    page.wait_for_timeout(1000)


def cursor(element) -> str:
    return element.evaluate("e => getComputedStyle(e).cursor")


chromium, url, trace_id, span, file = sys.argv[1:]
with sync_playwright() as playwright:
    # Without a sandbox: it needs rights that containers lack, and the page is our own server's.
    browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
    page = browser.new_page(viewport=SIZE)
    page.set_default_timeout(60_000)
    show(page, url, trace_id, span)
    page.screenshot(path=file)
    print(json.dumps(page.evaluate(WHOLE)))
    browser.close()
