package plugin

import (
	"cmp"
	"container/list"
	"errors"
	"slices"
	"strings"
	"sync"
)

// Faults gathers what is wrong with the many parts of a registry (a server, a login, a namespace, the watch of one service) into the one state
// that [Catalog].Degraded takes. An adapter that has one does not call Degraded itself.
//
// A part has one fault at most, of a kind K. Kinds are an enum of the adapter's, from what concerns everything to what concerns one service: those
// that are there are shown in the order of their values, joined by "; ".
//
// A kind is one sentence, however many parts have it: the text of the first fault, for as long as any part has that very text. Then the newest other
// one takes its place, since what failed last usually recovers last. The catalog is told when a sentence comes, changes or goes, and of nothing
// else: 5,000 watches that fail alike are one call, and their recovery is another.
//
// Methods may be called from any goroutine.
type Faults[K cmp.Ordered] struct {
	catalog Catalog

	mu    sync.Mutex // guards everything below, and the order of the calls to catalog
	parts map[string]*sentence[K]
	kinds []*faultKind[K] // in the order of K
	shown string          // what the catalog was told, "" for nothing wrong
}

// faultKind is what there is of one kind of fault.
type faultKind[K cmp.Ordered] struct {
	kind      K
	sentences map[string]*sentence[K]
	order     *list.List   // the sentences, the newest last
	shown     *sentence[K] // one of them, nil if there are none
}

// sentence is a text that parts have as their fault. It is there once, however many they are.
type sentence[K cmp.Ordered] struct {
	of    *faultKind[K]
	text  string
	parts int           // how many have it
	at    *list.Element // in of.order
}

// NewFaults returns a Faults that tells catalog.
func NewFaults[K cmp.Ordered](catalog Catalog) *Faults[K] {
	return &Faults[K]{catalog: catalog, parts: make(map[string]*sentence[K])}
}

// Set says that a part has a fault of a kind, in place of the one that it had. With a nil error it is Clear.
func (f *Faults[K]) Set(part string, kind K, err error) {
	if err == nil {
		f.Clear(part)
		return
	}
	text := cmp.Or(clip(err.Error(), maxReasonBytes), "unknown error")
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

// Clear says that nothing is wrong with a part any more. It costs next to nothing where nothing was.
func (f *Faults[K]) Clear(part string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if was := f.parts[part]; was != nil {
		delete(f.parts, part)
		was.drop()
		f.tellLocked()
	}
}

// kindLocked returns what there is of a kind. Kinds are few, and stay.
func (f *Faults[K]) kindLocked(kind K) *faultKind[K] {
	i, ok := slices.BinarySearchFunc(f.kinds, kind, func(k *faultKind[K], kind K) int { return cmp.Compare(k.kind, kind) })
	if !ok {
		f.kinds = slices.Insert(f.kinds, i, &faultKind[K]{kind: kind, sentences: make(map[string]*sentence[K]), order: list.New()})
	}
	return f.kinds[i]
}

// tellLocked tells the catalog what is to be shown, if that has changed.
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

// add returns the sentence of a text, with one more part that has it.
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

// drop takes note that a part does not have the sentence any more.
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
