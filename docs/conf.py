"""Settings of Sphinx. `make docs` builds the site, in outputs/site.

The source directory is the root of the repository: links between pages work in the site as they do there. Files that
are no pages, such as examples, are shown as highlighted source, or at `REPOSITORY_URL`.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from inspect import Parameter, Signature
from pathlib import Path
from typing import Any

from docutils import nodes
from furo.navigation import get_navigation_tree
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.ext.napoleon import Config, GoogleDocstring
from sphinx.util.inspect import stringify_signature
from sphinx.util.nodes import make_refnode

import lightning_pipesync
from lightning_pipesync.methods.method import Method
from lightning_pipesync.training.registry import METHODS

ROOT = Path(__file__).parents[1]
#: Where the repository is, such as https://github.com/OWNER/lightning-pipesync. If unknown, the site shows its files.
REPOSITORY_URL = os.environ.get("DOCS_REPOSITORY_URL", "")
#: What the site shows besides its pages.
SHOWN = ("benchmarks", "examples", "integrations", "tests/conformance/example_method", "constraints*.txt")
LANGUAGES = {".py": "python", ".sbatch": "bash", ".sh": "bash", ".txt": "text", ".yaml": "yaml"}

project = "lightning-pipesync"
author = "the authors of lightning-pipesync"
release = version = lightning_pipesync.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.viewcode", "sphinx_copybutton", "sphinx_design"]
root_doc = "README"
include_patterns = ["docs/**.md", "examples/README.md", "integrations/**.md", "README.md", "C*.md"]
# integrations/lightning is for Lightning's own documentation.
exclude_patterns = [".*", "outputs", "build", "dist", "**/__pycache__", "integrations/lightning", "docs/navigation.md"]
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 6
default_role = "code"

autodoc_default_options = {
    "member-order": "bysource",
    # The same for each method, in the tables of its page, or for frameworks.
    "exclude-members": "config_type, lab, metric_infos, shown_metrics, for_trainer, set_by_trainer, compares_steps",
}
#: Types of settings that are shown by name.
autodoc_type_aliases = {name: name for name in ("MiB", "MiBRange", "Seconds", "Injection", "Compression")}
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
maximum_signature_line_length = 80

html_theme = "furo"
html_title = f"{project} {release}"
html_static_path = ["site.css"]
html_css_files = ["site.css"]
html_copy_source = html_show_sourcelink = False
html_show_sphinx = False
html_show_copyright = False


def source_files() -> dict[Path, list[Path]]:
    """Returns the files that the site shows, by their folder."""
    found = [one for pattern in SHOWN for path in ROOT.glob(pattern) for one in (path, *sorted(path.rglob("*")))]
    folders: dict[Path, list[Path]] = {}
    for path in found:
        if path.suffix in LANGUAGES:
            folders.setdefault(path.parent, []).append(path)
    return folders


def add_navigation(app: Sphinx, page: str, source: list[str]) -> None:
    """Adds the sidebar's links to the first page, the README, which shows none where the repository does."""
    if page == root_doc:
        source[0] += "\n" + (ROOT / "docs/navigation.md").read_text()


def link_files(app: Sphinx, doctree: nodes.document) -> None:
    """Resolves links to files and folders of the repository that are no pages."""
    page, folders = app.env.docname, source_files()
    for node in [*doctree.findall(addnodes.pending_xref), *doctree.findall(addnodes.download_reference)]:
        target = Path(os.path.normpath(ROOT / Path(page).parent / node["reftarget"]))
        if node.get("reftype") != "myst" or node["refdomain"] == "doc" or not target.is_relative_to(ROOT):
            continue
        path = target.relative_to(ROOT).as_posix()
        if (target / "README.md").is_file():
            uri = app.builder.get_relative_uri(page, f"{path}/README")
        elif REPOSITORY_URL and target.exists():
            uri = f"{REPOSITORY_URL}/blob/main/{path}"
        elif target in folders or target in folders.get(target.parent, ()):
            uri = app.builder.get_relative_uri(page, f"source/{path}")
        else:
            continue  # Sphinx warns
        node.replace_self(nodes.reference("", "", *node.children, refuri=uri, internal=not uri.startswith("http")))


def source_pages(app: Sphinx) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Yields a page for each source file, and one for each folder of them."""
    for folder, paths in {} if REPOSITORY_URL else source_files().items():
        for path in paths:
            code = app.builder.highlighter.highlight_block(path.read_text(), LANGUAGES[path.suffix])
            yield _source_page(path, code)
        files = (f'<li><a href="{folder.name}/{path.name}.html">{path.name}</a></li>' for path in paths)
        if folder != ROOT:
            yield _source_page(folder, f"<ul>{''.join(files)}</ul>")


def _source_page(path: Path, body: str) -> tuple[str, dict[str, Any], str]:
    name = path.relative_to(ROOT).as_posix()
    return f"source/{name}", {"title": name, "body": f"<h1>{name}</h1>{body}"}, "page.html"


def signature_of_class(app: Sphinx, what: str, name: str, obj: Any, *rest: Any) -> tuple[str, None] | None:
    """Returns the signature of a method with its settings, and none of a dataclass: its fields follow, with docs."""
    if what != "class":
        return None
    if is_dataclass(obj):
        return "", None
    config = getattr(obj, "config_type", None) if issubclass(obj, Method) else None
    if config is None:
        return None
    given = [one for one in inspect.signature(obj).parameters.values() if one.kind is not Parameter.VAR_KEYWORD]
    settings = [Parameter(field.name, Parameter.KEYWORD_ONLY, default=field.default) for field in fields(config)]
    return stringify_signature(Signature([*given, *settings]), show_annotation=False), None


def hide_methods_of_settings(app: Sphinx, what: str, name: str, obj: Any, skip: bool, options: Any) -> bool | None:
    """Leaves out what is no field of a method's settings: a user sets fields, the rest is for the method."""
    owner, _, _ = getattr(getattr(obj, "fget", obj), "__qualname__", "").partition(".")
    return True if owner.endswith("Config") else None


def format_docstring(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Formats docstrings of Google's style.

    Napoleon's own extension takes the text of an attribute up to a colon for its type. Strategies inherit docstrings.
    """
    if what == "class" and not lines:
        lines += (inspect.getdoc(obj) or "").splitlines()
    if what == "class" and name.endswith("Strategy") and "Args:" in lines:  # the page has them already
        config, layout = METHODS[obj.name].config_type, getattr(obj, "layout_type", None)
        further = "DDPStrategy" if layout is None else f"DDPStrategy and :class:`{layout.__name__}`"
        arguments = f"Settings are in :class:`{config.__name__}`; the other arguments are those of {further}."
        lines[lines.index("Args:") :] = [arguments]
    if what in ("attribute", "data", "property"):
        what = "object"
    lines[:] = GoogleDocstring(lines, Config(napoleon_use_ivar=True), app, what, name, obj, options).lines()


def show_section(app: Sphinx, page: str, template: str, context: dict[str, Any], *rest: Any) -> None:
    """Shows in the sidebar the pages below the current section only: the theme would show those of all."""
    tree = context["toctree"](collapse=True, titles_only=True, maxdepth=-1, includehidden=True)
    context["furo_navigation_tree"] = get_navigation_tree(tree)


def link_by_class_name(app: Sphinx, env: BuildEnvironment, node: Any, content: nodes.Element) -> nodes.Element | None:
    """Resolves a reference to a class of another module, if the API pages have one class of this name."""
    classes = {name: entry for name, entry in env.domains.python_domain.objects.items() if entry.objtype == "class"}
    found = [entry for name, entry in classes.items() if name.rpartition(".")[2] == node["reftarget"]]
    if node.get("refdomain") != "py" or len(found) != 1:
        return None
    return make_refnode(app.builder, node["refdoc"], found[0].docname, found[0].node_id, content)


def setup(app: Sphinx) -> None:
    app.connect("source-read", add_navigation)
    app.connect("doctree-read", link_files, priority=100)  # before Sphinx copies the files that are linked to
    app.connect("html-collect-pages", source_pages)
    app.connect("missing-reference", link_by_class_name)
    app.connect("html-page-context", show_section, priority=600)  # after the theme's own
    app.connect("autodoc-process-signature", signature_of_class)
    app.connect("autodoc-skip-member", hide_methods_of_settings)
    app.connect("autodoc-process-docstring", format_docstring)
