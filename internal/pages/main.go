// Command pages generates docs/registries from the READMEs of the adapters.
// With the argument -check it writes nothing, and exits with status 1 if a page
// is outdated.
package main

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
)

func main() {
	if err := run(".", len(os.Args) > 1 && os.Args[1] == "-check"); err != nil {
		fmt.Fprintln(os.Stderr, "pages:", err)
		os.Exit(1)
	}
}

// run writes or checks the pages of the repository at root.
func run(root string, check bool) error {
	readmes, err := filepath.Glob(filepath.Join(root, "adapters", "*", "README.md"))
	if err != nil {
		return err
	}
	if len(readmes) == 0 {
		return errors.New("there is no adapters/*/README.md; start it in the root of the repository")
	}
	var stale []error
	for _, readme := range readmes {
		name := filepath.Base(filepath.Dir(readme))
		text, err := os.ReadFile(readme)
		if err != nil {
			return err
		}
		page := filepath.Join(root, "docs", "registries", name+".md")
		was, err := os.ReadFile(page)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		now := render(name, string(text))
		switch {
		case bytes.Equal(was, now):
		case check:
			stale = append(stale, fmt.Errorf("%s is not current; run make generate", page))
		default:
			if err := os.WriteFile(page, now, 0o644); err != nil { //nolint:gosec // a file of the repository
				return err
			}
		}
	}
	return errors.Join(stale...)
}

// render generates a page from a README and adjusts its links.
func render(name, readme string) []byte {
	readme = strings.ReplaceAll(readme, "](../../docs/registries/", "](")
	readme = strings.ReplaceAll(readme, "](../../docs/", "](../")
	readme = strings.ReplaceAll(readme, "](../README.md", "](../../adapters/README.md")
	return []byte("<!-- Made by \"make generate\" from adapters/" + name + "/README.md. Do not edit. -->\n\n" + readme)
}
