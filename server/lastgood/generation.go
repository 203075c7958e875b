package lastgood

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/klauspost/compress/zstd"

	"github.com/isthmus-mesh/isthmus/plugin/collection"
	"github.com/isthmus-mesh/isthmus/server/state"
	"github.com/isthmus-mesh/isthmus/server/state/saved"
)

const itemsVersion = saved.Format

// errLost means that removals missing from a generation have already been
// evicted from the change log.
var errLost = errors.New("more was removed meanwhile than the state remembers")

// bufferSize is the number of buffered bytes at which frames are written before
// the pass ends.
const bufferSize = 1 << 20

// generation is a file being written. It is not safe for concurrent use.
type generation struct {
	db     *state.DB
	number int
	path   string
	file   *os.File

	encoder *zstd.Encoder
	items   []byte // of the next frame
	out     []byte // frames not yet in the file

	// place is the current position, and committed the position on disk, to
	// which an error rolls back.
	place, committed place
	first            int64 // size after the first commit, 0 before it
}

type place struct {
	cursors    map[string]state.ClaimsCursor // by collection
	revision   state.Revision                // of the claims at the last pass
	registries []savedRegistry
	size       int64 // of the file
	frames     uint32
	at         time.Time // time of the last commit
}

func (p place) clone() place {
	p.cursors, p.registries = maps.Clone(p.cursors), slices.Clone(p.registries)
	return p
}

// collections are in reading order, ServiceEntries last. An instance that
// changes during a pass is in the next pass, and the order loses no instance of
// a service.
var collections = func() []string {
	all := slices.Sorted(slices.Values(collection.All()))
	all = slices.DeleteFunc(all, func(c string) bool { return c == collection.ServiceEntry })
	return append(all, collection.ServiceEntry)
}()

func generationPath(dir string, number int) string {
	return filepath.Join(dir, fmt.Sprintf("state-%08d.isthmus", number))
}

// newGeneration creates an empty file.
func newGeneration(db *state.DB, dir string, number int) (*generation, error) {
	g := &generation{db: db, number: number, path: generationPath(dir, number), encoder: newEncoder()}
	var err error
	if g.file, err = os.OpenFile(g.path, os.O_RDWR|os.O_CREATE|os.O_TRUNC, 0o600); err != nil {
		return nil, err
	}
	g.out = appendHead(nil, itemsVersion)
	g.place.cursors = make(map[string]state.ClaimsCursor)
	return g, nil
}

// openGeneration continues a file that was read up to the last commit. The
// state must equal its content.
func openGeneration(db *state.DB, dir string, number int, c *contents) (*generation, error) {
	g := &generation{db: db, number: number, path: generationPath(dir, number), encoder: newEncoder(), first: c.first}
	var err error
	if g.file, err = os.OpenFile(g.path, os.O_RDWR, 0o600); err != nil {
		return nil, err
	}
	if err := g.file.Truncate(c.size); err != nil {
		return nil, errors.Join(err, g.file.Close())
	}
	g.place = place{
		cursors: make(map[string]state.ClaimsCursor), revision: db.ClaimsRevision(), registries: c.commit.Registries, size: c.size, frames: c.frames, at: c.commit.Time,
	}
	for _, coll := range collections {
		g.place.cursors[coll] = db.ClaimsNow(coll)
	}
	g.committed = g.place.clone()
	return g, nil
}

func (g *generation) close() error { return errors.Join(g.file.Close(), g.encoder.Close()) }

// remove closes and deletes the file.
func (g *generation) remove() error { return errors.Join(g.close(), os.Remove(g.path)) }

// rollback discards everything since the last commit.
func (g *generation) rollback() {
	g.place = g.committed.clone()
	g.items, g.out = g.items[:0], g.out[:0]
	_ = g.file.Truncate(g.place.size) // an uncommitted rest is ignored when read
}

// registry returns the number of a registry, and assigns one if necessary.
func (g *generation) registry(name, adapter string) int {
	for n := len(g.place.registries) - 1; n >= 0; n-- {
		if r := &g.place.registries[n]; r.Name == name && r.Type == adapter {
			return n
		}
	}
	g.place.registries = append(g.place.registries, savedRegistry{Name: name, Type: adapter})
	return len(g.place.registries) - 1
}

// behind reports whether the state has changed since the last pass.
func (g *generation) behind() bool { return g.db.ClaimsRevision() != g.place.revision || g.first == 0 }

// advance appends changes, until deadline unless it is zero, and reports
// whether it appended all. Adapters are by registry name.
func (g *generation) advance(adapters map[string]string, deadline time.Time) (bool, error) {
	revision := g.db.ClaimsRevision()
	numbers := make(map[string]int)
	number := func(r *state.Record) int {
		name := r.Registry()
		n, known := numbers[name]
		if !known {
			n = g.registry(name, adapters[name])
			numbers[name] = n
		}
		return n
	}
	for _, coll := range collections {
		cursor := g.place.cursors[coll]
		count := 0
		for c := range g.db.Claims(coll, &cursor) {
			g.items = c.AppendSaved(g.items, coll, number)
			if len(g.items) >= dataSize {
				if err := g.frame(); err != nil {
					return false, err
				}
			}
			if count++; count%256 == 0 && !deadline.IsZero() && time.Now().After(deadline) {
				g.place.cursors[coll] = cursor
				return false, nil
			}
		}
		if cursor.Lost {
			return false, errLost
		}
		g.place.cursors[coll] = cursor
	}
	g.place.revision = revision
	return true, nil
}

// frame completes a data frame.
func (g *generation) frame() error {
	if len(g.items) == 0 {
		return nil
	}
	g.put(frameData, g.encoder.EncodeAll(g.items, nil))
	g.items = g.items[:0]
	if len(g.out) >= bufferSize {
		return g.write()
	}
	return nil
}

func (g *generation) put(kind uint32, payload []byte) {
	g.out = appendFrame(g.out, kind, g.place.frames, payload)
	g.place.frames++
}

func (g *generation) write() error {
	_, err := g.file.WriteAt(g.out, g.place.size)
	g.place.size += int64(len(g.out))
	g.out = g.out[:0]
	return err
}

// commit ends a pass. With sync, the pass is on disk when commit returns.
func (g *generation) commit(now time.Time, sync bool) error {
	if err := g.frame(); err != nil {
		return err
	}
	payload, err := json.Marshal(commit{Registries: g.place.registries, Time: now})
	if err != nil {
		return err
	}
	g.put(frameCommit, payload)
	if err := g.write(); err != nil {
		return err
	}
	if sync {
		if err := g.file.Sync(); err != nil {
			return err
		}
	}
	g.place.at = now
	if g.first == 0 {
		g.first = g.place.size
	}
	g.committed = g.place.clone()
	return nil
}
