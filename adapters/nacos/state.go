package nacos

import (
	"errors"
	"log/slog"
	"strings"
	"sync"

	"github.com/isthmus-mesh/isthmus/plugin"
)

// faultKind is what keeps the registry from being followed. They are shown in this order.
type faultKind int

const (
	// faultAway: no server can be reached, or the one at hand does not serve.
	faultAway faultKind = iota
	// faultAuth: the server refuses who asks.
	faultAuth
	// faultNamespace: a namespace does not exist, or is empty and may not exist.
	faultNamespace
	// faultList: which services there are cannot be learnt.
	faultList
	// faultService: a service cannot be subscribed or asked for.
	faultService
	// faultGrace: what was known before an outage is kept for a while.
	faultGrace

	faultKinds
)

// state gathers what is wrong with any part into the registry's one state, and counts what is still missing before the first listing
// is complete. It speaks to the catalog only when a sentence comes or goes.
type state struct {
	catalog plugin.Catalog
	log     *slog.Logger

	mu sync.Mutex // guards everything below, and the order of the calls to catalog
	// kinds holds the parts that have each kind of fault, and the error of the first of them.
	kinds [faultKinds]struct {
		parts map[string]bool
		text  string
	}
	// shown is what the catalog was told, "" for nothing wrong.
	shown string
	// waiting counts the scopes and services whose first answer is not in yet.
	waiting int
	synced  bool
}

func newState(catalog plugin.Catalog, log *slog.Logger) *state {
	s := &state{catalog: catalog, log: log}
	for i := range s.kinds {
		s.kinds[i].parts = map[string]bool{}
	}
	return s
}

// set says that a part has a fault of a kind, or with nil that it has none of that kind any more.
func (s *state) set(part string, kind faultKind, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	k := &s.kinds[kind]
	switch {
	case err != nil:
		if len(k.parts) == 0 || len(k.parts) == 1 && k.parts[part] {
			k.text = err.Error()
		}
		k.parts[part] = true
	case k.parts[part]:
		delete(k.parts, part)
		if len(k.parts) == 0 {
			k.text = ""
		}
	default:
		return
	}
	s.tellLocked()
}

func (s *state) tellLocked() {
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
		s.log.Debug("nacos is followed again") // the bridge says so
		s.catalog.Degraded(nil)
		return
	}
	err := errors.New(text)
	s.log.Debug("nacos cannot be followed; what is known stays", slog.Any("err", err))
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
		s.log.Info("first listing is complete")
		s.catalog.Synced()
	}
}
