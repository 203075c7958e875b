package plugin

import (
	"bytes"
	"encoding/json"
	"log"
	"log/slog"
	"testing"

	"github.com/isthmus-mesh/isthmus/plugin/wire"
)

// TestStandardLog shows that what other code writes to the standard log is for
// debugging, and that package slog's own functions keep their level.
func TestStandardLog(t *testing.T) {
	for level, want := range map[string][]string{
		"DEBUG": {"debug Unsolicited response received on idle HTTP channel", "info told"},
		"INFO":  {"info told"},
	} {
		t.Run(level, func(t *testing.T) {
			writer, flags, logger := log.Writer(), log.Flags(), slog.Default()
			t.Cleanup(func() {
				slog.SetDefault(logger)
				slog.SetLogLoggerLevel(slog.LevelInfo)
				log.SetOutput(writer)
				log.SetFlags(flags)
			})
			t.Setenv(wire.LogLevelKey, level)
			var out bytes.Buffer
			takeStandardLog(newLogger(&out))
			log.Println("Unsolicited response received on idle HTTP channel")
			slog.Default().Info("told")
			var got []string
			for d := json.NewDecoder(&out); d.More(); {
				var line struct {
					Level   string `json:"@level"`
					Message string `json:"@message"`
				}
				if err := d.Decode(&line); err != nil {
					t.Fatal(err)
				}
				got = append(got, line.Level+" "+line.Message)
			}
			if len(got) != len(want) || got[0] != want[0] || got[len(got)-1] != want[len(want)-1] {
				t.Errorf("lines %q, want %q", got, want)
			}
		})
	}
}
