package main

import (
	"errors"
	"flag"
	"os"
	"os/exec"
	"path/filepath"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/rogpeppe/go-internal/testscript"

	"github.com/isthmus-mesh/isthmus/internal/watch"
)

// The program under test is the test binary itself, under its own name, so that
// it finds its adapters as it does when installed.
func TestMain(m *testing.M) {
	testscript.Main(m, map[string]func(){"isthmus": main, brokenAdapter: brokenMain, hostileAdapter: hostileMain})
}

func TestScripts(t *testing.T) {
	testscript.Run(t, testscript.Params{
		Dir:                 "testdata/script",
		RequireExplicitExec: true,
		RequireUniqueNames:  true,
		UpdateScripts:       *update,
		Cmds:                map[string]func(*testscript.TestScript, bool, []string){"exitcode": exitCode},
		Setup: func(e *testscript.Env) error {
			root, err := filepath.Abs("../..")
			e.Setenv("ROOT", root)
			e.Setenv("XDG_STATE_HOME", filepath.Join(e.WorkDir, "state"))
			e.Setenv("GORACE", os.Getenv("GORACE"))
			return err
		},
	})
}

var update = flag.Bool("update", false, "write what the program prints into the scripts")

// exitCode runs a program that must end with a code: exitcode CODE PROGRAM
// ARGS.
func exitCode(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) < 2 {
		ts.Fatalf("usage: exitcode CODE PROGRAM ARGS")
	}
	want, err := strconv.Atoi(args[0])
	ts.Check(err)
	err = ts.Exec(args[1], args[2:]...)
	if err == nil {
		ts.Fatalf("exit code 0, want %d", want)
	}
	if exit, ok := errors.AsType[*exec.ExitError](err); !ok || exit.ExitCode() != want {
		ts.Fatalf("%v, want exit code %d", err, want)
	}
}

func TestVersion(t *testing.T) {
	vcs := func(settings ...debug.BuildSetting) *debug.BuildInfo { return &debug.BuildInfo{Settings: settings} }
	revision := debug.BuildSetting{Key: "vcs.revision", Value: "0123456789abcdef"}
	for _, tt := range []struct {
		name, linked, want string
		info               *debug.BuildInfo
	}{
		{"linked", "v1.2.3", "v1.2.3", vcs(revision)},
		{"module", "", "v1.0.0", &debug.BuildInfo{Main: debug.Module{Version: "v1.0.0"}}},
		{"commit", "unknown", "0123456789ab", vcs(revision)},
		{"changed since", "", "0123456789ab-dirty", vcs(revision, debug.BuildSetting{Key: "vcs.modified", Value: "true"})},
		{"nothing known", "", "unknown", nil},
	} {
		if got := versionOf(tt.info, tt.linked); got != tt.want {
			t.Errorf("%s: version %q, want %q", tt.name, got, tt.want)
		}
	}
}

// A feed line is one change; a push of many is one line.
func TestFeed(t *testing.T) {
	lines := make(chan watch.Line)
	w := &lineWriter{ctx: t.Context(), to: lines}
	go func() {
		defer close(lines)
		// Owned by the test; ends with the text. Lines come in pieces.
		for _, piece := range strings.SplitAfter(`{"time":"2026-01-02T03:04:05.678Z","push":7,"collection":"networking.istio.io/WorkloadEntry","name":"demo/a-1","op":"upsert","resource":{"body":{"address":"10.0.0.1","weight":3}}}
{"time":"2026-01-02T03:04:05.678Z","push":7,"collection":"networking.istio.io/WorkloadEntry","name":"demo/a-2","op":"remove"}
`, ",") {
			if _, err := w.Write([]byte(piece)); err != nil {
				t.Errorf("Write: %v", err)
			}
		}
	}()
	var got []watch.Line
	for l := range lines {
		l.Time = l.Time.Local()
		got = append(got, l)
	}
	var out strings.Builder
	writePush(&out, got)
	clock := got[0].Time.Format("15:04:05.000")
	want := clock + "  push 7     upsert  WorkloadEntry  demo/a-1  10.0.0.1, weight 3\n" + clock + "  push 7     remove  WorkloadEntry  demo/a-2\n"
	if diff := cmp.Diff(want, out.String()); diff != "" {
		t.Errorf("feed (-want +got):\n%s", diff)
	}
	out.Reset()
	writePush(&out, slices.Repeat(got, 3))
	if want := clock + "  push 7     6 resources at once: WorkloadEntry demo/a-1 and others\n"; out.String() != want {
		t.Errorf("feed of many = %q, want %q", out.String(), want)
	}
	if _, err := w.Write([]byte("garbage\n")); err == nil {
		t.Error("a line that is not JSON was taken")
	}
}
