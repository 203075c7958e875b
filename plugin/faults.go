package plugin

import (
	"cmp"
	"container/list"
	"errors"
	"slices"
	"strings"
	"sync"

	"github.com/isthmus-mesh/isthmus/internal/clip"
)

// Faults combines the faults of the parts of a registry (a server, a login, a
// namespace, the watch of one service) into the single state of
// [Catalog].Degraded. An adapter that uses it does not call Degraded itself.
//
// A part has at most one fault, of a kind K. Kinds are an enum of the adapter,
// ordered from the most general to a single service; present kinds are shown in
// this order, joined by "; ".
//
// A kind is shown as one text for any number of parts: that of its first fault,
// while any part has exactly that text, and then the newest remaining one,
// since the last failure usually recovers last. The catalog is called only if
// the text changes: 5,000 watches that fail alike cost one call, and their
// recovery another.
//
// Faults is safe for concurrent use.
type Faults[K cmp.Ordered] struct {
	catalog Catalog

	mu    sync.Mutex // guards the fields below and the order of calls to catalog
	parts map[string]*sentence[K]
	kinds []*faultKind[K] // in the order of K
	shown string          // last reported text, "" for healthy
}

// faultKind holds the faults of one kind.
type faultKind[K cmp.Ordered] struct {
	kind      K
	sentences map[string]*sentence[K]
	order     *list.List   // sentences, the newest last
	shown     *sentence[K] // one of order, nil if it is empty
}

// sentence is a fault text, stored once for all parts that share it.
type sentence[K cmp.Ordered] struct {
	of    *faultKind[K]
	text  string
	parts int           // number of parts that share it
	at    *list.Element // in of.order
}

// NewFaults returns a Faults that reports to catalog.
func NewFaults[K cmp.Ordered](catalog Catalog) *Faults[K] {
	return &Faults[K]{catalog: catalog, parts: make(map[string]*sentence[K])}
}

// Set replaces the fault of a part. A nil error is equivalent to Clear.
func (f *Faults[K]) Set(part string, kind K, err error) {
	if err == nil {
		f.Clear(part)
		return
	}
	text := cmp.Or(clip.Text(redact(err.Error()), maxReasonBytes), "unknown error")
	f.mu.Lock()
	defer f.mu.Unlock()
	was := f.parts[part]
	if was != nil && was.of.kind == kind && was.text == text {
		return
	}
	f.parts[part] = f.kindLocked(kind).add(text)
	if was != nil {
		was.drop()
	}
	f.tellLocked()
}

// Clear removes the fault of a part. It is cheap if there is none.
func (f *Faults[K]) Clear(part string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if was := f.parts[part]; was != nil {
		delete(f.parts, part)
		was.drop()
		f.tellLocked()
	}
}

// kindLocked returns the entry of a kind. Kinds are few and never removed.
func (f *Faults[K]) kindLocked(kind K) *faultKind[K] {
	i, ok := slices.BinarySearchFunc(f.kinds, kind, func(k *faultKind[K], kind K) int { return cmp.Compare(k.kind, kind) })
	if !ok {
		f.kinds = slices.Insert(f.kinds, i, &faultKind[K]{kind: kind, sentences: make(map[string]*sentence[K]), order: list.New()})
	}
	return f.kinds[i]
}

// tellLocked reports the combined text to the catalog if it changed.
func (f *Faults[K]) tellLocked() {
	var texts []string
	for _, k := range f.kinds {
		if k.shown != nil {
			texts = append(texts, k.shown.text)
		}
	}
	text := strings.Join(texts, "; ")
	if text == f.shown {
		return
	}
	f.shown = text
	if text == "" {
		f.catalog.Degraded(nil)
		return
	}
	f.catalog.Degraded(errors.New(text))
}

// add returns the sentence of a text, with one more part.
func (k *faultKind[K]) add(text string) *sentence[K] {
	s := k.sentences[text]
	if s == nil {
		s = &sentence[K]{of: k, text: text}
		s.at = k.order.PushBack(s)
		k.sentences[text] = s
	}
	s.parts++
	if k.shown == nil {
		k.shown = s
	}
	return s
}

// drop removes one part from the sentence.
func (s *sentence[K]) drop() {
	if s.parts--; s.parts > 0 {
		return
	}
	k := s.of
	delete(k.sentences, s.text)
	k.order.Remove(s.at)
	if k.shown != s {
		return
	}
	k.shown = nil
	if newest := k.order.Back(); newest != nil {
		k.shown = newest.Value.(*sentence[K]) //nolint:forcetypeassert // nothing else is in the list
	}
}
