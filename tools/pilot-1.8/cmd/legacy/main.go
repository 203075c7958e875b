// Command legacy is a peer for tests, made of the libraries of Istio 1.8.0:
// sinks (pkg/mcp/sink) that keep what they get and tell about it, or a source
// (pkg/mcp/source) to compare with. It takes commands on standard input, one a
// line, and answers each with a line of JSON on standard output. It ends when
// its input does.
package main

import (
	"bufio"
	"encoding/json"
	"fmt"
	"os"
	"sync"

	"istio.io/pkg/log"
)

func main() {
	// The libraries log each message.
	options := log.DefaultOptions()
	options.OutputPaths = []string{"stderr"}
	options.SetOutputLevel(log.DefaultScopeName, log.ErrorLevel)
	options.SetOutputLevel("mcp", log.NoneLevel)
	if err := log.Configure(options); err != nil {
		fail(err)
	}
	if len(os.Args) < 2 {
		fail(fmt.Errorf("usage: legacy sink|source FLAGS"))
	}
	var err error
	switch os.Args[1] {
	case "sink":
		err = runSink(os.Args[2:])
	case "source":
		err = runSource(os.Args[2:])
	default:
		err = fmt.Errorf("no such command: %s", os.Args[1])
	}
	if err != nil {
		fail(err)
	}
}

func fail(err error) {
	fmt.Fprintln(os.Stderr, "legacy:", err)
	os.Exit(1)
}

var output sync.Mutex

// answer prints a line of JSON.
func answer(v interface{}) {
	output.Lock()
	defer output.Unlock()
	b, err := json.Marshal(v)
	if err != nil {
		fail(err)
	}
	fmt.Printf("%s\n", b)
}

// commands calls f with each line of the input.
func commands(f func(line string) error) error {
	lines := bufio.NewScanner(os.Stdin)
	for lines.Scan() {
		if err := f(lines.Text()); err != nil {
			return err
		}
	}
	return lines.Err()
}
