package lastgood

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"

	"github.com/isthmus-mesh/isthmus/internal/testenv"
	"github.com/isthmus-mesh/isthmus/plugin/collection"
	pluginv1 "github.com/isthmus-mesh/isthmus/plugin/proto/isthmus/plugin/v1"
	"github.com/isthmus-mesh/isthmus/server/encode"
	"github.com/isthmus-mesh/isthmus/server/state"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var dc1 = Registry{"dc1", "sim"}

// content is what sinks of both shapes get: a version by shape, collection and
// name, with the bytes that are sent.
func content(db *state.DB) map[string]string {
	out := make(map[string]string)
	for _, coll := range db.Collections() {
		for _, shape := range []encode.Shape{encode.Inline, encode.Workload} {
			l := encode.NewLayout(encode.Form{Shape: shape, Address: true})
			for c := range db.Changes(state.Kind{Collection: coll, Shape: shape}, new(state.Cursor)) {
				e := c.Record.Encode(l)
				out[fmt.Sprintf("%v %s %s", shape, coll, c.Name)] = e.Version.String() + string(e.Append(nil))
			}
		}
	}
	return out
}

// reopen returns what a restarted bridge serves from a directory, and its
// store.
func reopen(t testing.TB, dir string) (*state.DB, *Store) {
	t.Helper()
	db := newDB(t, "dc1")
	s := open(t, db, dir, dc1)
	s.restoreAll()()
	return db, s
}

// file returns the only generation of a directory.
func file(t testing.TB, dir string) string {
	t.Helper()
	found, err := filepath.Glob(filepath.Join(dir, "state-*.isthmus"))
	if err != nil || len(found) != 1 {
		t.Fatalf("the directory has %q, %v, want one generation", found, err)
	}
	return found[0]
}

// pass writes what changed.
func pass(t testing.TB, s *Store) {
	t.Helper()
	if err := s.pass(false); err != nil {
		t.Fatal(err)
	}
}

func closeStore(t testing.TB, s *Store) {
	t.Helper()
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
}

// history is a file that was written in several passes, and what was served
// after each.
type history struct {
	file   []byte
	name   string
	sizes  []int64
	states []map[string]string
}

// write writes the history of a state of so many services: everything, and then
// changes, additions and removals.
func write(t testing.TB, services int) *history {
	t.Helper()
	dir := t.TempDir()
	db := newDB(t, "dc1")
	s := open(t, db, dir, dc1)
	r := db.Registry("dc1")
	h := new(history)
	step := func() {
		pass(t, s)
		h.sizes = append(h.sizes, s.current.committed.size)
		h.states = append(h.states, content(db))
	}
	fill(t, r, services)
	step()
	r.Apply(&pluginv1.WatchResponse{Upserts: []*pluginv1.Upsert{instance("dc1/service-000000", 1, 7), instance("dc1/service-000000", 100, 0)}})
	step()
	r.Apply(&pluginv1.WatchResponse{Removals: []*pluginv1.Removal{{Collection: collection.WorkloadEntry, Name: "dc1/service-000000-2"}}})
	step()
	r.Apply(&pluginv1.WatchResponse{
		Removals: []*pluginv1.Removal{{Collection: collection.ServiceEntry, Name: "dc1/service-000001"}},
		Upserts:  []*pluginv1.Upsert{entry("dc1/later"), instance("dc1/later", 1, 0)},
	})
	step()
	h.name = filepath.Base(file(t, dir))
	closeStore(t, s)
	var err error
	if h.file, err = os.ReadFile(filepath.Join(dir, h.name)); err != nil {
		t.Fatal(err)
	}
	return h
}

// damaged shows what a bridge makes of a damaged file: it serves what was
// written by one of the passes before the damage, as a whole, or nothing. It
// says so. What it writes then is good again.
func (h *history) damaged(t *testing.T, what string, raw []byte, intact int64, again bool) {
	t.Helper()
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, h.name), raw, 0o600); err != nil {
		t.Fatal(err)
	}
	db, s := reopen(t, dir)
	got := content(db)
	want, complete := map[string]string{}, false
	for n, size := range h.sizes {
		if size <= intact {
			want, complete = h.states[n], true
		}
	}
	if !maps.Equal(got, want) {
		t.Fatalf("%s: %d resources are served, want %d of the last intact pass (-want +got):\n%s", what, len(got), len(want), cmp.Diff(want, got))
	}
	if db.Synced() != complete {
		t.Fatalf("%s: synced is %v, want %v", what, db.Synced(), complete)
	}
	atCommit := intact == int64(len(raw)) && slices.Contains(h.sizes, intact)
	if why := s.Status().Reading; (why == "") != atCommit {
		t.Fatalf("%s: it says %q", what, why)
	}
	if again {
		// The registry comes back, as it was at last.
		r := db.Registry("dc1")
		fill(t, r, 2)
		live := content(db)
		for range 3 { // a new generation may be due
			pass(t, s)
		}
		closeStore(t, s)
		db, s = reopen(t, dir)
		if after := content(db); !maps.Equal(after, live) || s.Status().Reading != "" || !db.Synced() {
			t.Fatalf("%s: a restart later %d resources are served, want %d; it says %q", what, len(after), len(live), s.Status().Reading)
		}
		file(t, dir) // the damaged one is gone
	}
	closeStore(t, s)
}

// A small state cut off or damaged at each of its bytes.
func TestSmallFaults(t *testing.T) {
	h := write(t, 2)
	t.Logf("%d bytes, commits at %v", len(h.file), h.sizes)
	for n := range len(h.file) + 1 {
		h.damaged(t, fmt.Sprintf("cut off at byte %d", n), h.file[:n:n], int64(n), n%97 == 0)
	}
	for n := range h.file {
		bad := slices.Clone(h.file)
		bad[n] ^= 1 << (n % 8)
		h.damaged(t, fmt.Sprintf("damaged at byte %d", n), bad, int64(n), n%97 == 0)
	}
}

// A large state cut off or damaged every 4 KiB.
func TestLargeFaults(t *testing.T) {
	h := write(t, 1_000)
	t.Logf("%d bytes, commits at %v", len(h.file), h.sizes)
	for n := 0; n < len(h.file); n += 4 << 10 {
		h.damaged(t, fmt.Sprintf("cut off at byte %d", n), h.file[:n:n], int64(n), false)
		bad := slices.Clone(h.file)
		bad[n] ^= 0xff
		h.damaged(t, fmt.Sprintf("damaged at byte %d", n), bad, int64(n), false)
		clear(bad[n:]) // a file system that has the length and not the content
		h.damaged(t, fmt.Sprintf("zero from byte %d", n), bad, int64(n), false)
	}
}

// What another version wrote is not read, said, and kept until there is
// something better.
func TestOtherVersion(t *testing.T) {
	h := write(t, 2)
	binary.LittleEndian.PutUint32(h.file[len(magic):], formatVersion+1)
	binary.LittleEndian.PutUint32(h.file[headSize-4:], crc32.Checksum(h.file[:headSize-4], castagnoli))
	dir := t.TempDir()
	path := filepath.Join(dir, h.name)
	if err := os.WriteFile(path, h.file, 0o600); err != nil {
		t.Fatal(err)
	}
	db, s := reopen(t, dir)
	if why := s.Status().Reading; !strings.Contains(why, "another version of isthmus wrote it (format 2.2; this one reads 1.2)") || len(content(db)) > 0 || db.Synced() {
		t.Errorf("it says %q and serves %d resources", why, len(content(db)))
	}
	pass(t, s)
	if _, err := os.Stat(path); err != nil {
		t.Errorf("before the first listing the file of the other version is gone: %v", err)
	}
	fill(t, db.Registry("dc1"), 2)
	pass(t, s)
	if _, err := os.Stat(path); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("after the first listing the file of the other version is there: %v", err)
	}
	closeStore(t, s)
}

// A full disk is shown, costs nothing that is live, leaves the last state that
// was written as it was, and is written to again when there is room.
func TestFullDisk(t *testing.T) {
	dir, _ := testenv.MountTmpfs(t, "size=256k")
	db := newDB(t, "dc1")
	s := open(t, db, dir, dc1)
	r := db.Registry("dc1")
	fill(t, r, 20)
	pass(t, s)
	small := content(db)
	filler := filepath.Join(dir, "filler")
	if err := os.WriteFile(filler, make([]byte, 256<<10), 0o600); !errors.Is(err, syscall.ENOSPC) {
		t.Fatalf("fill the disk: %v", err)
	}
	fill(t, r, 500)
	live := content(db)
	err := s.pass(false)
	if !errors.Is(err, syscall.ENOSPC) || !strings.Contains(reason(err), "make room on the disk") {
		t.Fatalf("a pass on a full disk: %v", err)
	}
	if !maps.Equal(content(db), live) {
		t.Error("what is served changed")
	}
	raw, err := os.ReadFile(file(t, dir))
	if err != nil {
		t.Fatal(err)
	}
	copied := t.TempDir()
	if err := os.WriteFile(filepath.Join(copied, "state-00000001.isthmus"), raw, 0o600); err != nil {
		t.Fatal(err)
	}
	other, restored := reopen(t, copied)
	if !maps.Equal(content(other), small) {
		t.Errorf("a restart on the full disk would serve %d resources, want %d", len(content(other)), len(small))
	}
	closeStore(t, restored)
	if err := os.Remove(filler); err != nil {
		t.Fatal(err)
	}
	pass(t, s)
	closeStore(t, s)
	again, s := reopen(t, dir)
	if !maps.Equal(content(again), live) {
		t.Errorf("with room again a restart serves %d resources, want %d", len(content(again)), len(live))
	}
	closeStore(t, s)
}

// A disk that cannot be written to is read; Run shows what is wrong, and writes
// when it can.
func TestReadOnlyDisk(t *testing.T) {
	dir, remount := testenv.MountTmpfs(t, "size=16m")
	db := newDB(t, "dc1")
	s := open(t, db, dir, dc1)
	fill(t, db.Registry("dc1"), 5)
	pass(t, s)
	want := content(db)
	closeStore(t, s)

	remount(true)
	db, s = reopen(t, dir)
	if !maps.Equal(content(db), want) || !db.Synced() {
		t.Errorf("from a disk that is read-only %d resources are served, want %d", len(content(db)), len(want))
	}
	if why := s.Status().Writing; !strings.Contains(why, "read-only file system; name a directory that can be written to in state.dir") {
		t.Errorf("it says %q", why)
	}
	if err := s.pass(false); !errors.Is(err, syscall.EROFS) {
		t.Errorf("a pass: %v", err)
	}
	remount(false)
	fill(t, db.Registry("dc1"), 6)
	pass(t, s)
	closeStore(t, s)
	want = content(db)
	if db, s = reopen(t, dir); !maps.Equal(content(db), want) {
		t.Errorf("%d resources are served, want %d", len(content(db)), len(want))
	}
	file(t, dir)
	closeStore(t, s)
}

// Only one bridge uses a directory at a time.
func TestInUse(t *testing.T) {
	dir := t.TempDir()
	s := open(t, newDB(t, "dc1"), dir, dc1)
	_, err := Open(newDB(t, "dc1"), Options{Dir: dir, Log: s.log, Metrics: newRegistry()})
	inUse, ok := errors.AsType[*InUseError](err)
	if !ok || inUse.PID != fmt.Sprint(os.Getpid()) || !strings.Contains(err.Error(), dir) || !strings.Contains(err.Error(), "state.dir") {
		t.Errorf("the second one: %v", err)
	}
	closeStore(t, s)
	closeStore(t, open(t, newDB(t, "dc1"), dir, dc1))
}

// A change is on disk within a second, without anybody asking.
func TestRunWrites(t *testing.T) {
	dir := t.TempDir()
	db := newDB(t, "dc1")
	s := open(t, db, dir, dc1)
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- s.Run(ctx) }() // ends with ctx
	<-s.Restored()
	fill(t, db.Registry("dc1"), 5)
	time.Sleep(time.Second)
	found, err := filepath.Glob(filepath.Join(dir, "state-*"))
	if err != nil || len(found) != 1 {
		t.Fatalf("after a second there is %q, %v", found, err)
	}
	raw, err := os.ReadFile(found[0])
	if err != nil {
		t.Fatal(err)
	}
	copied := t.TempDir()
	if err := os.WriteFile(filepath.Join(copied, filepath.Base(found[0])), raw, 0o600); err != nil {
		t.Fatal(err)
	}
	other, restored := reopen(t, copied)
	if !maps.Equal(content(other), content(db)) || !other.Synced() {
		t.Errorf("after a second %d resources are on disk, want %d", len(content(other)), len(content(db)))
	}
	closeStore(t, restored)
	cancel()
	if err := <-ended; err != nil {
		t.Error(err)
	}
}

// Churn does not make the files grow without bound, and what is restored after
// it is what was served, at any time.
func TestChurn(t *testing.T) {
	dir := t.TempDir()
	db := newDB(t, "dc1")
	s := open(t, db, dir, dc1)
	r := db.Registry("dc1")
	fill(t, r, 50)
	pass(t, s)
	s.rotateAbove = 32 << 10
	begun := s.last
	for i := range 400 {
		m := new(pluginv1.WatchResponse)
		for j := range 40 {
			m.Upserts = append(m.Upserts, instance(fmt.Sprintf("dc1/service-%06d", j), j*perService, uint32(i+1)))
		}
		r.Apply(m)
		pass(t, s)
		size := int64(0)
		found, err := filepath.Glob(filepath.Join(dir, "state-*"))
		if err != nil {
			t.Fatal(err)
		}
		for _, path := range found {
			if info, err := os.Stat(path); err == nil {
				size += info.Size()
			}
		}
		if size > 128<<10 {
			t.Fatalf("after %d passes the files have %d bytes", i, size)
		}
	}
	if s.last-begun < 3 {
		t.Errorf("%d new generations were begun", s.last-begun)
	}
	closeStore(t, s)
	other, s := reopen(t, dir)
	if !maps.Equal(content(other), content(db)) {
		t.Error("what is restored is not what was served")
	}
	closeStore(t, s)
}

// When the configuration is loaded again, what is written follows it: a
// registry that was renamed is restored under its new name, one that was
// removed is not, and a bridge that ends before that was written serves only
// what it has all of.
func TestRegistriesChange(t *testing.T) {
	dir := t.TempDir()
	db := state.New([]string{"dc1", "dc2"}, state.Options{}, discard, newRegistry())
	s := open(t, db, dir, dc1, Registry{"dc2", "file"})
	fill(t, db.Registry("dc1"), 20)
	db.Registry("dc2").Begin(nil)
	db.Registry("dc2").Apply(&pluginv1.WatchResponse{Upserts: []*pluginv1.Upsert{entry("dc2/web"), instance("dc2/web", 1, 0)}, Synced: true})
	pass(t, s)

	db.SetRegistries([]string{"east"}, map[string]string{"east": "dc1"})
	s.SetRegistries([]Registry{{"east", "sim"}})
	east := Registry{"east", "sim"}
	restored := func() map[string]string {
		t.Helper()
		// A copy, as the bridge has the directory.
		other := t.TempDir()
		if err := os.CopyFS(other, os.DirFS(dir)); err != nil {
			t.Fatal(err)
		}
		again := newDB(t, "east")
		r := open(t, again, other, east)
		r.restoreAll()()
		closeStore(t, r)
		return content(again)
	}
	if got := restored(); len(got) > 0 {
		t.Errorf("before it is written: %d resources of a registry that nothing was kept of", len(got))
	}
	pass(t, s)
	want := content(db)
	if d := cmp.Diff(want, restored()); d != "" {
		t.Errorf("after the first pass (-served +restored):\n%s", d)
	}
	db.Registry("east").Apply(&pluginv1.WatchResponse{Upserts: []*pluginv1.Upsert{instance("dc1/service-000003", 1, 7)}})
	pass(t, s)
	if d := cmp.Diff(content(db), restored()); d != "" {
		t.Errorf("after a change (-served +restored):\n%s", d)
	}
	file(t, dir)
	closeStore(t, s)
}

var discard = slog.New(slog.DiscardHandler)
