// Look-ups with Go's net/http as it comes: go run look_ups.go URL < requests > answers.
package main

import (
	"bufio"
	"bytes"
	"encoding/base64"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"strconv"
	"strings"
)

type parameters map[string]any

type tensor struct {
	Name       string     `json:"name"`
	Shape      []int      `json:"shape,omitempty"`
	Datatype   string     `json:"datatype,omitempty"`
	Parameters parameters `json:"parameters"`
}

type request struct {
	ID      *string  `json:"id,omitempty"`
	Inputs  []tensor `json:"inputs"`
	Outputs []tensor `json:"outputs"`
}

func lookUp(url, line string) error {
	id, fields, _ := strings.Cut(line, "\t")
	keys := strings.Fields(fields)
	data := new(bytes.Buffer)
	for _, field := range keys {
		key, err := strconv.ParseInt(field, 10, 64)
		if err != nil {
			return err
		}
		binary.Write(data, binary.LittleEndian, key)
	}
	asked := request{
		Inputs:  []tensor{{"item_id", []int{len(keys)}, "INT64", parameters{"binary_data_size": data.Len()}}},
		Outputs: []tensor{{Name: "item_id", Parameters: parameters{"binary_data": true}}, {Name: "item_id.found", Parameters: parameters{"binary_data": true}}},
	}
	if id != "-" {
		asked.ID = &id
	}
	document, err := json.Marshal(asked)
	if err != nil {
		return err
	}
	post, err := http.NewRequest("POST", url, bytes.NewReader(append(document, data.Bytes()...)))
	if err != nil {
		return err
	}
	post.Header.Set("Content-Type", "application/octet-stream")
	post.Header.Set("Inference-Header-Content-Length", strconv.Itoa(len(document)))
	answer, err := http.DefaultClient.Do(post)
	if err != nil {
		return err
	}
	defer answer.Body.Close()
	body, err := io.ReadAll(answer.Body)
	if err != nil {
		return err
	}
	if answer.StatusCode != 200 {
		return fmt.Errorf("%s: %s", answer.Status, body)
	}
	fmt.Println(answer.Header.Get("Inference-Header-Content-Length"), base64.StdEncoding.EncodeToString(body))
	return nil
}

func main() {
	lines := bufio.NewScanner(os.Stdin)
	lines.Buffer(nil, 1<<24)
	for lines.Scan() {
		if err := lookUp(os.Args[1], lines.Text()); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
	}
}
