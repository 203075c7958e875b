package consul

import (
	"errors"
	"log/slog"
	"strings"
	"sync"

	"github.com/isthmus-mesh/isthmus/plugin"
)

// state gathers what is wrong with any watch into the registry's one state, and counts what is still missing before the first listing
// is complete. It speaks to the catalog only when a sentence comes or goes: a storm of 5,000 failing watches is one of each.
// The bridge logs these changes for people, so the records made here are for debugging.
type state struct {
	catalog plugin.Catalog
	log     *slog.Logger

	mu sync.Mutex // guards everything below, and the order of the calls to catalog
	// kinds holds the watches that have each kind of fault, and the error of the first of them.
	kinds [faultKinds]struct {
		watches map[string]bool
		text    string
	}
	// shown is what the catalog was told, "" for nothing wrong.
	shown string
	// waiting counts the scopes and services whose first complete answer is not in yet.
	waiting int
	synced  bool
}

func newState(catalog plugin.Catalog, log *slog.Logger) *state {
	s := &state{catalog: catalog, log: log}
	for i := range s.kinds {
		s.kinds[i].watches = map[string]bool{}
	}
	return s
}

// set says what is wrong with a watch, and takes back what was said before of any other kind. Nil takes everything back.
func (s *state) set(watch string, f *fault) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for i := range s.kinds {
		k := &s.kinds[i]
		switch {
		case f != nil && faultKind(i) == f.kind:
			if len(k.watches) == 0 {
				k.text = f.err.Error()
			}
			k.watches[watch] = true
		case k.watches[watch]:
			delete(k.watches, watch)
			if len(k.watches) == 0 {
				k.text = ""
			}
		}
	}
	var texts []string
	for i := range s.kinds {
		if s.kinds[i].text != "" {
			texts = append(texts, s.kinds[i].text)
		}
	}
	text := strings.Join(texts, "; ")
	if text == s.shown {
		return
	}
	s.shown = text
	if text == "" {
		s.log.Debug("consul is followed again")
		s.catalog.Degraded(nil)
		return
	}
	err := errors.New(text)
	s.log.Debug("consul cannot be followed; what is known stays", slog.Any("err", err))
	s.catalog.Degraded(err)
}

// expect says that one more first answer is awaited.
func (s *state) expect() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.waiting++
}

// arrived says that one of the awaited answers is in, or that what it was about is gone.
func (s *state) arrived() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.waiting--
	if s.waiting == 0 && !s.synced {
		s.synced = true
		s.log.Debug("first listing is complete")
		s.catalog.Synced()
	}
}
