package state

import (
	"encoding/binary"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/isthmus-mesh/isthmus/plugin/collection"
	"github.com/isthmus-mesh/isthmus/server/encode"
)

// SavedFormat is the version of the output of [Claims.AppendSaved]. It changes
// with the encoding and with the input of content hashes.
const SavedFormat = 2

// Kinds of saved items.
const (
	savedRemoval  = iota // collection, name
	savedPlain           // a resource published unchanged
	savedEntry           // the ServiceEntry of a service
	savedInstance        // an instance of a service

	// savedMore is added to the kind of a further claim on the same name. An
	// item without it replaces all claims on its name.
	savedMore = 4
)

// savedTraits are the traits that are saved.
const savedTraits = isStatic | isComposable | ownAddress | ownLabel

// appendSaved appends the record; the number identifies its registry.
func (r *Record) appendSaved(b []byte, registry int, more bool) []byte {
	b = binary.AppendUvarint(b, uint64(registry))
	var flag byte
	if more {
		flag = savedMore
	}
	switch {
	case r.parts != nil:
		b = append(b, savedEntry|flag)
	case r.of != nil:
		b = append(b, savedInstance|flag)
		b = appendText(b, r.of.name)
	default:
		b = append(b, savedPlain|flag)
	}
	b = appendText(b, r.kind.url)
	b = append(b, byte(r.traits&savedTraits))
	b = binary.LittleEndian.AppendUint64(b, uint64(r.hash))
	for _, n := range []int{int(r.specAt), int(r.nameAt), int(r.nameLen), int(r.addressAt), int(r.addressLen)} {
		b = binary.AppendUvarint(b, uint64(n))
	}
	return appendText(b, r.buf)
}

// appendRemoved appends the removal of a name from all registries.
func appendRemoved(b []byte, coll, name string) []byte {
	b = append(binary.AppendUvarint(b, 0), savedRemoval)
	return appendText(appendText(b, coll), name)
}

func appendText(b []byte, s string) []byte {
	return append(binary.AppendUvarint(b, uint64(len(s))), s...)
}

// Saved is a parsed run of saved items.
type Saved struct{ items []savedItem }

type savedItem struct {
	record   *Record // nil for a removal
	registry int     // number
	more     bool    // does not replace the claims of other registries
	service  string  // of an instance
	host     string  // of a service that gets its address by host

	table *table // of a removal
	name  string // of a removal
}

var errSaved = errors.New("malformed")

// savedReader reads the fields of items. After an error it returns zero values.
type savedReader struct {
	rest []byte
	bad  bool
}

func (s *savedReader) number(limit uint64) int {
	n, size := binary.Uvarint(s.rest)
	if size <= 0 || n > limit {
		s.bad, s.rest = true, nil
		return 0
	}
	s.rest = s.rest[size:]
	return int(n)
}

func (s *savedReader) bytes(n int) []byte {
	if n > len(s.rest) {
		s.bad, s.rest = true, nil
		return nil
	}
	b := s.rest[:n]
	s.rest = s.rest[n:]
	return b
}

func (s *savedReader) text() []byte { return s.bytes(s.number(2 * encode.MaxSize)) }

// ParseSaved parses and copies a run of saved items. It is safe for concurrent
// use. Bytes not in this format are an error.
func (d *DB) ParseSaved(run []byte) (Saved, error) {
	var out Saved
	s := savedReader{rest: run}
	kinds := make(map[string]*kind)
	service := ""
	for len(s.rest) > 0 {
		it := savedItem{registry: s.number(1<<16 - 2)}
		typ := s.number(savedInstance | savedMore)
		it.more = typ&savedMore != 0
		typ &^= savedMore
		switch typ {
		case savedRemoval:
			it.table = d.tables[string(s.text())]
			it.name = string(s.text())
			if s.bad || it.table == nil || it.more {
				return Saved{}, errSaved
			}
			out.items = append(out.items, it)
			continue
		case savedInstance:
			if name := s.text(); string(name) != service {
				service = string(name)
			}
			it.service = service
		}
		url := s.text()
		k := kinds[string(url)]
		if k == nil {
			if k = d.savedKind(string(url)); k == nil {
				return Saved{}, errSaved
			}
			kinds[string(url)] = k
		}
		r := &Record{kind: k}
		if b := s.bytes(1); len(b) == 1 {
			r.traits = traits(b[0]) & savedTraits
		}
		if b := s.bytes(8); len(b) == 8 {
			r.hash = encode.Hash(binary.LittleEndian.Uint64(b))
		}
		specAt, nameAt, nameLen := s.number(1<<31), s.number(1<<31), s.number(1<<16-1)
		addressAt, addressLen := s.number(1<<31), s.number(1<<16-1)
		buf := s.text()
		if s.bad || specAt > len(buf) || nameLen == 0 || nameAt+nameLen > len(buf) || addressAt+addressLen > len(buf) || addressAt < specAt {
			return Saved{}, errSaved
		}
		if typ == savedEntry && k.collection.name != collection.ServiceEntry || typ == savedInstance && k.collection.name != collection.WorkloadEntry {
			return Saved{}, errSaved
		}
		r.buf = string(buf)
		r.specAt, r.nameAt, r.nameLen = uint32(specAt), uint32(nameAt), uint16(nameLen)
		r.addressAt, r.addressLen = uint32(addressAt), uint16(addressLen)
		if typ == savedEntry {
			r.parts = &composition{}
			if hosts := encode.Hosts(r.Spec()); !r.is(ownAddress) && len(hosts) > 0 {
				it.host = hosts[0]
			}
		}
		it.record = r
		out.items = append(out.items, it)
	}
	if s.bad {
		return Saved{}, errSaved
	}
	return out, nil
}

// savedKind returns the kind of a body URL without a registry, nil if the kind
// is not served.
func (d *DB) savedKind(url string) *kind {
	if t := d.tables[collection.OfBody(url)]; t != nil {
		return &kind{collection: t, url: url}
	}
	return nil
}

// SavedRegistry is the registry that a number in saved items identifies.
type SavedRegistry struct {
	// Name is the registry's name. Items of registries missing from the DB are
	// left out.
	Name string
	// AsOf is the last time at which the saved items were known to be current.
	AsOf time.Time
}

// Restored summarizes the items restored for a registry.
type Restored struct {
	Registry            string
	Services, Instances int
	Published           int // resources without a service
	LeftOut             int // beyond a limit, or instances without their service
}

// ErrNotEmpty is returned when restoring into a DB that is in use.
var ErrNotEmpty = errors.New("state: what was saved has to be restored before any registry is followed")

// Restore serves saved items until the registries are listed. Later items
// replace earlier ones of the same name, and conflicts are decided anew. Each
// registry in registries counts as having completed its first listing; its
// first own listing removes what it does not mention. The DB must be unused.
func (d *DB) Restore(saved []Saved, registries []SavedRegistry) ([]Restored, error) {
	d.apply.Lock()
	defer d.apply.Unlock()
	for _, t := range d.tables {
		if len(t.index) > 0 {
			return nil, ErrNotEmpty
		}
	}
	for _, r := range d.registries {
		if r.listing > 0 || r.status.Synced {
			return nil, ErrNotEmpty
		}
	}
	l := loader{d: d, items: saved}
	for _, s := range registries {
		r := d.registryLocked(s.Name)
		l.registries = append(l.registries, r)
		if r != nil {
			r.status.Restored = s.AsOf
		}
	}
	var err error
	d.book.changeAll(func() {
		if err = l.merge(); err != nil {
			for _, t := range d.tables {
				clear(t.index)
			}
			return
		}
		l.link()
		l.compose()
		l.contest()
	})
	if err != nil {
		for _, r := range d.registries {
			r.status.Restored = time.Time{}
		}
		return nil, err
	}
	l.enter()
	l.decide()
	var out []Restored
	for n, r := range l.registries {
		if r == nil {
			continue
		}
		r.status.Services, r.status.Instances = uint64(r.services), uint64(r.instances)
		d.metrics.setSizes(r)
		d.metrics.setBytes(r)
		d.metrics.setServed(r)
		d.metrics.setRestored(r)
		d.restored.Add(1)
		out = append(out, Restored{
			Registry: r.name, Services: r.services, Instances: r.instances, Published: r.resources - r.services - r.instances, LeftOut: l.leftOut[n],
		})
	}
	d.remark()
	d.wake()
	return out, nil
}

// loader implements Restore. The caller holds apply.
type loader struct {
	d          *DB
	items      []Saved
	registries []*Registry // by number; nil if not configured
	leftOut    []int       // by number
	services   []*savedItem
	several    []savedName // of several claims, more than once possibly
	batch      *batch      // decides on what may be in conflict
	whole      bool        // everything is within the limits
}

type savedName struct {
	table *table
	name  string
}

// merge keeps the last claims of each name and drops the others.
func (l *loader) merge() error {
	count := make(map[*table]int)
	for _, s := range l.items {
		for i := range s.items {
			if r := s.items[i].record; r != nil {
				count[r.kind.collection]++
			}
		}
	}
	for t, n := range count {
		t.index = make(map[string]*Record, n)
	}
	l.leftOut = make([]int, len(l.registries))
	seen := make(map[*Registry]bool)
	for _, r := range l.registries {
		if r != nil && seen[r] {
			return fmt.Errorf("registry %q is there twice", r.name)
		}
		seen[r] = true
	}
	for _, s := range l.items {
		for i := range s.items {
			it := &s.items[i]
			t, name := it.table, it.name
			if it.record != nil {
				t, name = it.record.kind.collection, it.record.Name()
			}
			if it.registry >= len(l.registries) && it.record != nil {
				return fmt.Errorf("there is no registry number %d", it.registry)
			}
			if !it.more {
				l.dropClaims(t, name)
			}
			if it.record == nil || l.registries[it.registry] == nil {
				it.record = nil
				continue
			}
			it.record.kind = l.registries[it.registry].kindOf(t, it.record.kind.url)
			if it.more {
				l.addClaim(it.record)
				continue
			}
			t.index[name] = it.record
		}
	}
	return nil
}

// dropClaims drops the claims on a name. Its key in the index, which retains
// a buffer, goes with them.
func (l *loader) dropClaims(t *table, name string) {
	old := t.index[name]
	if old == nil {
		return
	}
	for ; old != nil; old = old.next {
		old.kind = nil // dropped
	}
	delete(t.index, name)
}

// addClaim adds a claim to those of other registries on its name.
func (l *loader) addClaim(c *Record) {
	t, name := c.kind.collection, c.Name()
	claims := claimsOn(t.index[name])
	claims = slices.DeleteFunc(claims, func(old *Record) bool {
		same := old.kind.registry == c.kind.registry
		if same {
			old.kind = nil
		}
		return same
	})
	claims = append(claims, c)
	slices.SortFunc(claims, precedence)
	delete(t.index, name)
	t.relink(name, claims)
	if len(claims) > 1 {
		l.several = append(l.several, savedName{t, name})
	}
}

// each calls f with each item that was not dropped.
func (l *loader) each(f func(*savedItem)) {
	for _, s := range l.items {
		for i := range s.items {
			if it := &s.items[i]; it.record != nil && it.record.kind != nil {
				f(it)
			}
		}
	}
}

// link applies the limits of the registries and builds their services.
func (l *loader) link() {
	d := l.d
	take := func(it *savedItem, fits bool) bool {
		r, c := l.registries[it.registry], it.record
		isEntry := c.Collection() == collection.ServiceEntry
		if !fits || !l.whole && (isEntry && r.entries >= d.options.MaxServices || r.resources >= d.options.MaxResources || r.bytes+c.size() > d.options.MaxBytes) {
			l.leftOut[it.registry]++
			c.kind.collection.drop(c)
			it.record = nil
			return false
		}
		r.resources++
		if isEntry {
			r.entries++
		}
		r.bytes += c.size()
		return true
	}
	l.each(func(it *savedItem) {
		c := it.record
		if c.parts == nil || !take(it, true) {
			return
		}
		name := c.Name()
		selector, label := d.selector(name)
		c.of = &service{registry: l.registries[it.registry], name: strings.Clone(name), selector: selector, label: label}
		c.parts.selector = selector
		d.claimHosts(entryID{c.of.registry, c.of.name}, encode.Hosts(c.Spec()))
		if it.host != "" {
			c.of.host = strings.Clone(it.host)
			d.countHost(c.of.host, 1)
		}
		c.of.registry.services++
		l.services = append(l.services, it)
	})
	entries := d.tables[collection.ServiceEntry]
	var last *Record // the entry of the previous instance
	l.each(func(it *savedItem) {
		c := it.record
		if c.parts != nil {
			return
		}
		if it.service == "" {
			if take(it, true) && c.Collection() == collection.ServiceEntry {
				d.claimHosts(entryID{l.registries[it.registry], strings.Clone(c.Name())}, encode.Hosts(c.Spec()))
			}
			return
		}
		if last == nil || last.Name() != it.service || last.kind.registry != c.kind.registry {
			last = entries.claim(it.service, c.kind.registry)
		}
		e := last
		if !take(it, e != nil && e.parts != nil) {
			return
		}
		c.of = e.of
		c.of.registry.instances++
		c.of.added = append(c.of.added, c)
	})
}

// compose adds the instances to their services.
func (l *loader) compose() {
	var group sync.WaitGroup
	for part := range slices.Chunk(l.services, max(1, len(l.services)/runtime.GOMAXPROCS(0)+1)) {
		group.Go(func() {
			for _, it := range part {
				s := it.record.of
				parts := it.record.parts.with(s.added, nil)
				parts.address = l.d.addressOf(s.host)
				it.record.parts = parts
				s.added = nil
			}
		})
	}
	group.Wait()
	for _, it := range l.services {
		if s := it.record.of; s.host != "" && !it.record.parts.address.IsValid() {
			s.unaddressed = true
			s.registry.unaddressed++
		}
	}
}

// contest marks what may be in conflict: names of several claims, and hosts of
// several registries with the instances of their services.
func (l *loader) contest() {
	d := l.d
	if len(d.registries) == 0 {
		return
	}
	b := &batch{r: d.registries[0], db: d}
	l.batch = b
	entries := d.tables[collection.ServiceEntry]
	undecided := func(c *Record) {
		c.mark(isUndecided, true)
		b.touch(c.kind.collection, c.Name())
	}
	entry := func(c *Record) {
		if c == nil || c.marked(isUndecided) {
			return
		}
		undecided(c)
		if c.parts != nil {
			c.of.each(undecided)
		}
	}
	b.markAll()
	for host := range b.marked {
		for c := d.claims.now[host]; c != nil; c = c.next {
			entry(entries.claim(c.name, c.registry))
		}
	}
	for _, s := range l.several {
		if s.table == entries {
			b.markName(s.name)
		}
		for c := s.table.index[s.name]; c != nil; c = c.next {
			if s.table == entries {
				entry(c)
			} else {
				undecided(c)
			}
		}
	}
}

// decide serves what may be in conflict as the rules have it. Nothing of it is
// in a log before, so that none of it is seen to be removed.
func (l *loader) decide() {
	l.d.book.changeAll(func() { l.each(func(it *savedItem) { it.record.mark(isUndecided, false) }) })
	if l.batch != nil {
		l.d.decideOn(l.batch)
	}
	for _, r := range l.registries {
		if r != nil {
			r.status.Revision = l.d.revision
		}
	}
}

// enter appends the records that are not in conflict to the logs, in the order
// of the items.
func (l *loader) enter() {
	l.d.write(func() { l.d.book.changeAll(l.enterLocked) })
}

func (l *loader) enterLocked() {
	d := l.d
	for _, t := range d.tables {
		for _, s := range shapesOf(t) {
			t.logs[s].Grow(len(t.index))
		}
	}
	l.each(func(it *savedItem) {
		c := it.record
		if c.marked(isUndecided) {
			return
		}
		d.setServed(c, true)
		t := c.kind.collection
		for _, s := range shapesOf(t) {
			if log := t.logs[s]; c.visible(log.shape) {
				d.revision++
				log.enter(c, d.revision)
			}
		}
	})
}
