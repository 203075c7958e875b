"""Links of the documentation to files of the repository outside docs/ lead to
the repository; one that leads nowhere fails the build."""

import os
import posixpath
import re

REPOSITORY = "https://github.com/isthmus-mesh/isthmus"
LINK = re.compile(r"(?<=\]\()([^)#\s:]+)(#[^)\s]*)?(?=\))")
FENCE = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)


def on_page_markdown(markdown, page, config, **_):
    root = os.path.dirname(config["config_file_path"])

    def target(match):
        path, anchor = match.group(1), match.group(2) or ""
        full = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page.file.src_uri), path))
        if not os.path.exists(os.path.join(root, full)):
            raise SystemExit(f"docs/{page.file.src_uri} links to {path}, which is not there")
        directory = os.path.isdir(os.path.join(root, full))
        if full.startswith("docs/") and not directory:
            return match.group(0)
        return f"{REPOSITORY}/{'tree' if directory else 'blob'}/main/{full}{anchor}"

    parts = FENCE.split(markdown)
    return "".join(p if p.startswith("```") else LINK.sub(target, p) for p in parts)
