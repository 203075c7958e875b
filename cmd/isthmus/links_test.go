package main

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"regexp"
	"slices"
	"strings"
	"testing"
	"testing/fstest"
)

var (
	// link finds the targets of Markdown's links.
	link = regexp.MustCompile(`\]\(([^)\s]+)\)`)
	// mention finds pages that any text names: by their address, or by their
	// path in the repository.
	mention = regexp.MustCompile(`(?:isthmus-mesh/isthmus/(?:(?:blob|tree)/)?main/|\b)((?:docs|examples|adapters|deploy)/[a-z0-9_./-]+(?:README)?\.(?:md|json|yaml)|(?:README|CONTRIBUTING|CHANGELOG|SECURITY)\.md)(#[\w-]+)?`)
	heading = regexp.MustCompile(`(?m)^#{1,6} +(.+?)\s*$`)
	fence   = regexp.MustCompile("(?ms)^ *```.*?^ *```$")
	linked  = regexp.MustCompile(`\[([^\]]*)\]\([^)]*\)`)
	symbols = regexp.MustCompile(`[^\p{L}\p{N}_ -]`)
)

// anchors returns the anchors of a page's headings, as GitHub makes them.
func anchors(page string) []string {
	var all []string
	seen := make(map[string]int)
	for _, m := range heading.FindAllStringSubmatch(fence.ReplaceAllString(page, ""), -1) {
		text := linked.ReplaceAllString(m[1], "$1")
		a := strings.ReplaceAll(symbols.ReplaceAllString(strings.ToLower(text), ""), " ", "-")
		if n := seen[a]; n > 0 {
			all = append(all, fmt.Sprintf("%s-%d", a, n))
		} else {
			all = append(all, a)
		}
		seen[a]++
	}
	return all
}

// brokenLinks returns how many links to files of the repository there are in
// its pages, sources and deployments, and those that lead nowhere.
func brokenLinks(repo fs.FS) (found int, broken []string, err error) {
	pages := make(map[string][]string)
	check := func(from, name, anchor string) error {
		found++
		if _, err := fs.Stat(repo, name); errors.Is(err, fs.ErrNotExist) {
			broken = append(broken, fmt.Sprintf("%s links to %s, which is not there", from, name))
			return nil
		} else if err != nil || anchor == "" || path.Ext(name) != ".md" {
			return err
		}
		if pages[name] == nil {
			text, err := fs.ReadFile(repo, name)
			if err != nil {
				return err
			}
			pages[name] = anchors(string(text))
		}
		if !slices.Contains(pages[name], anchor) {
			broken = append(broken, fmt.Sprintf("%s links to %s#%s, and there is no such heading", from, name, anchor))
		}
		return nil
	}
	err = fs.WalkDir(repo, ".", func(file string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		ext := path.Ext(file)
		switch {
		case d.IsDir() && (d.Name() == ".git" || d.Name() == "testdata" || d.Name() == "dist"):
			return fs.SkipDir
		case d.IsDir(), strings.HasSuffix(file, "_test.go"), !slices.Contains([]string{".md", ".go", ".html", ".json", ".yaml", ".yml", ".service"}, ext):
			return nil
		}
		raw, err := fs.ReadFile(repo, file)
		if err != nil {
			return err
		}
		text := string(raw)
		if ext == ".md" {
			text = fence.ReplaceAllString(text, "")
			for _, m := range link.FindAllStringSubmatch(text, -1) {
				if strings.Contains(m[1], "://") || strings.HasPrefix(m[1], "mailto:") {
					continue
				}
				name, anchor, _ := strings.Cut(m[1], "#")
				if name = path.Join(path.Dir(file), name); strings.HasPrefix(m[1], "#") {
					name = file
				}
				if err := check(file, name, anchor); err != nil {
					return err
				}
			}
			text = link.ReplaceAllStringFunc(text, func(l string) string {
				if strings.Contains(l, "isthmus-mesh/isthmus/") {
					return l
				}
				return "" // it is relative
			})
		}
		for _, m := range mention.FindAllStringSubmatch(text, -1) {
			if err := check(file, m[1], strings.TrimPrefix(m[2], "#")); err != nil {
				return err
			}
		}
		return nil
	})
	return found, broken, err
}

// Every link to a file of the repository leads somewhere, and so does its
// anchor: those of pages to each other, and those of sources, alerts and
// charts to pages.
func TestLinks(t *testing.T) {
	found, broken, err := brokenLinks(os.DirFS("../.."))
	if err != nil {
		t.Fatal(err)
	}
	for _, b := range broken {
		t.Error(b)
	}
	if found < 500 {
		t.Errorf("%d links were found: the pattern is wrong", found)
	}
}

// Links that lead nowhere are found, wherever they are.
func TestBrokenLinksAreFound(t *testing.T) {
	const url = "https://github.com/isthmus-mesh/isthmus/blob/main/"
	const page = "# A page\n\n## Reload, `now`\n\n```sh\n# no heading\n```\n\n## Twice\n\n## Twice\n\n"
	repo := fstest.MapFS{}
	for name, text := range map[string]string{
		"docs/a.md":         page + "[a](b.md#b) [b](#reload-now) [c](#twice-1) [d](../README.md) [e](https://example.org/#x)",
		"docs/b.md":         "# B\n\n[a](a.md#no-heading) [b](a.md#twice-2) [c](#nowhere) [d](c.md) [e](" + url + "docs/a.md#gone)",
		"README.md":         "[a](docs/a.md#a-page)",
		"main.go":           "// docs/a.md#twice says so.\nconst url = \"" + url + "docs/a.md#removed\" // see docs/old.md",
		"server/page.html":  `<a href="` + url + `docs/b.md#c">`,
		"deploy/rules.yaml": "runbook_url: " + url + "docs/b.md#d",
	} {
		repo[name] = &fstest.MapFile{Data: []byte(text)}
	}
	_, broken, err := brokenLinks(repo)
	if err != nil {
		t.Fatal(err)
	}
	want := []string{
		"deploy/rules.yaml links to docs/b.md#d, and there is no such heading",
		"docs/b.md links to docs/a.md#gone, and there is no such heading",
		"docs/b.md links to docs/a.md#no-heading, and there is no such heading",
		"docs/b.md links to docs/a.md#twice-2, and there is no such heading",
		"docs/b.md links to docs/b.md#nowhere, and there is no such heading",
		"docs/b.md links to docs/c.md, which is not there",
		"main.go links to docs/a.md#removed, and there is no such heading",
		"main.go links to docs/old.md, which is not there",
		"server/page.html links to docs/b.md#c, and there is no such heading",
	}
	if slices.Sort(broken); !slices.Equal(broken, want) {
		t.Errorf("got:\n%s\nwant:\n%s", strings.Join(broken, "\n"), strings.Join(want, "\n"))
	}
}
