package e2e

import (
	"bufio"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/isthmus-mesh/isthmus/internal/testenv/testisthmus"
)

// BenchmarkExecChange measures, for one changed instance among many, the time
// from the line that a program writes to its arrival at a bare reader of the
// program's output and at a delta sink of Isthmus, in the same run. The program
// is cat, twice, behind a pipe each. It reports medians, and the 99th
// percentile of what Isthmus adds, beside by how much a second bare reader is
// later than the first.
//
//	go test ./test/e2e -run '^$' -bench ExecChange -benchtime 1000x
func BenchmarkExecChange(b *testing.B) {
	for _, services := range []int{1000, 10_000} {
		b.Run(fmt.Sprintf("services=%d", services), func(b *testing.B) { benchmarkExecChange(b, services) })
	}
}

func benchmarkExecChange(b *testing.B, services int) {
	const perService = 10
	line := func(service, change int) []byte {
		instances := make([]map[string]any, perService)
		for i := range instances {
			instances[i] = map[string]any{"id": fmt.Sprint(i), "address": fmt.Sprintf("10.%d.%d.%d", i, service/250, service%250), "port": 8080, "meta": map[string]string{"protocol": "http"}}
		}
		instances[0]["meta"] = map[string]string{"protocol": "http", "change": fmt.Sprint(change)}
		text, err := json.Marshal(map[string]any{"service": map[string]any{"name": fmt.Sprintf("svc-%d", service), "instances": instances}})
		if err != nil {
			b.Fatal(err)
		}
		return append(text, '\n')
	}
	write := func(f *os.File, text []byte) {
		if _, err := f.Write(text); err != nil {
			b.Fatal(err)
		}
	}
	pipe, path := namedPipe(b)
	bridge := testisthmus.Start(b, fmt.Sprintf(`- {name: program, type: exec, config: {command: [cat, %q]}}`, path))
	begin := time.Now()
	for s := range services {
		write(pipe, line(s, 0))
	}
	write(pipe, []byte("{\"synced\":true}\n"))
	bridge.WaitReady(b)
	b.Logf("isthmus ready %v after the first line", time.Since(begin).Round(100*time.Millisecond))

	delta := bridge.Arrivals(b, services*perService)
	barePipe, bare := bareReader(b)
	secondPipe, second := bareReader(b)
	testisthmus.MeasureChanges(b, func(n int) {
		text := line(n%services, n)
		write(pipe, text)
		write(barePipe, text)
		write(secondPipe, text)
	}, bare, second, delta)
}

// namedPipe makes a named pipe and opens it for writing.
func namedPipe(b *testing.B) (*os.File, string) {
	b.Helper()
	path := filepath.Join(b.TempDir(), "pipe")
	if err := syscall.Mkfifo(path, 0o600); err != nil {
		b.Fatal(err)
	}
	// Not for writing alone, which would wait for the reader.
	pipe, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { pipe.Close() })
	return pipe, path
}

// bareReader starts the program, and returns the pipe that it copies and when
// each of its lines arrives.
func bareReader(b *testing.B) (*os.File, <-chan time.Time) {
	b.Helper()
	pipe, path := namedPipe(b)
	cmd := exec.CommandContext(b.Context(), "cat", path) // Context ends before the cleanups
	out, err := cmd.StdoutPipe()
	if err != nil {
		b.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		b.Fatal(err)
	}
	arrived, done := make(chan time.Time, 16), make(chan struct{})
	// Owned by the benchmark; ends with the program.
	go func() {
		defer close(done)
		lines := bufio.NewReaderSize(out, 1<<20)
		for {
			if _, err := lines.ReadSlice('\n'); err != nil {
				return
			}
			arrived <- time.Now()
		}
	}()
	b.Cleanup(func() {
		<-done
		_ = cmd.Wait() // killed
	})
	return pipe, arrived
}
